"""The memory plan: exact sums, more memory never gives less, and no plan that cannot be run."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import mlx.core as mx
import pytest

from checkpoints import random_weights, tiny_config, tokens, write
from mlx_moe.config import ModelConfig
from mlx_moe.generation import process_prompt
from mlx_moe.models.qwen4_exp import attention
from mlx_moe.paging import sizes
from mlx_moe.paging.arena import SlotArena
from mlx_moe.paging.plan import (
    PROCESS_BYTES,
    SYSTEM_BYTES,
    Machine,
    MemoryPlan,
    Wanted,
    parse_bytes,
    plan_memory,
    remedies,
)
from mlx_moe.paging.sizes import PAGE_BYTES, ModelSizes, key_capacity, sparse_cache_bytes, state_bytes, workspace_bytes
from mlx_moe.runtime import load_model
from real_geometry import mixed, real_config

GIB = 1 << 30
RECORD = {"IQ2_S": 1_510_400, "IQ2_XXS": 1_305_600, "IQ1_M": 1_177_600}
MACHINES = [Machine.simulated(n * GIB) for n in (8, 12, 16, 24, 32, 48, 64, 128)]


@pytest.fixture(scope="module")
def real() -> ModelSizes:
    """The published model with records of three sizes, and a draft layer."""
    records = tuple(RECORD[mixed(i)[0]] for i in range(49))
    config = ModelConfig.from_dict(real_config())
    return ModelSizes(config, 3_760_000_000, 3_300_000_000, 80_000_000, records, 1440, 28_800_000_000)


def slot_bytes(sizes: ModelSizes) -> int:
    return sum(-(-record // 16384) * 16384 for record in sizes.records)


def plan(sizes: ModelSizes, memory: int | Machine = 24 * GIB, **wanted) -> MemoryPlan:
    machine = memory if isinstance(memory, Machine) else Machine.simulated(memory)
    return plan_memory(sizes, machine, Wanted(**wanted))


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: f"{m.memory_bytes >> 30}GiB")
@pytest.mark.parametrize("context", [1, 4096, 50_000, 262_144])
def test_sums(real, machine, context):
    found = plan(real, machine, context=context)
    assert (
        found.total_bytes
        == sum(found.parts.values())
        == sum(
            getattr(found, field.name)
            for field in dataclasses.fields(found)
            if field.name.endswith("_bytes") and field.name != "ceiling_bytes"
        )
    )
    assert found.arena_bytes == found.slots * slot_bytes(real) + 4 * PAGE_BYTES
    assert found.system_bytes + found.total_bytes == machine.memory_bytes
    assert (found.total_bytes <= found.ceiling_bytes) == (found.shortfall_bytes == 0)
    if not found.shortfall_bytes:
        assert found.gpu_bytes <= machine.working_set_bytes and found.wired_limit_mb is None
        assert found.system_bytes >= SYSTEM_BYTES, "the system would swap"
        more = found.total_bytes + slot_bytes(real)
        assert found.slots == real.most_slots or more > found.ceiling_bytes, "one slot more would fit"


def test_more_memory_never_gives_less(real):
    ceilings = [plan(real, 64 * GIB, memory_bytes=n * 10**8) for n in range(60, 560, 5)]
    machines = [plan(real, machine) for machine in MACHINES]
    for plans in (ceilings, machines):
        assert [p.slots for p in plans] == sorted(p.slots for p in plans)
        assert [p.shortfall_bytes for p in plans] == sorted((p.shortfall_bytes for p in plans), reverse=True)
    assert ceilings[0].shortfall_bytes and not ceilings[-1].shortfall_bytes
    assert len({p.slots for p in ceilings}) > 50


def test_what_is_asked_for_costs_slots(real):
    base = plan(real).slots
    for change in (
        {"context": 65536}, {"snapshots": 8}, {"prefill_step_size": 4096}, {"item_bytes": 4},
        {"memory_bytes": 15 * 10**9},        {"row_cache_bytes": 10**9, "memory_bytes": 19_800_000_000},
    ):  # fmt: skip
        assert plan(real, **change).slots < base, change


def test_records_of_several_sizes(real):
    """Not an average: pages of every layer's own record."""
    same = dataclasses.replace(real, records=(max(real.records),) * 49)
    assert plan(same).slots < plan(real).slots
    pages = {1_510_400: 93, 1_305_600: 80, 1_177_600: 72}
    assert real.slot_bytes == 16384 * sum(pages[record] for record in real.records)


def test_the_arena_takes_what_the_plan_says():
    sizes = ModelSizes(ModelConfig.from_dict(tiny_config()), 0, 0, 0, (20_000, 16_384, 50_000, 1))
    for slots in (3, 4, 5):
        arena = SlotArena([(record, slots) for record in sizes.records], 10**9)
        assert 0 <= sizes.arena_bytes(slots) - arena.nbytes < 4 * PAGE_BYTES


def test_no_more_slots_than_the_arena_can_have(real):
    """All experts take 36 GB; four chunks of 8 GiB do not hold that many."""
    found = plan(real, 128 * GIB)
    assert found.slots == real.most_slots < 512
    assert found.arena_bytes < 4 * 8 * GIB
    small = dataclasses.replace(real, records=(1_100_000,) * 49)
    assert plan(small, 128 * GIB).slots == 512


def test_slots_that_are_asked_for(real):
    found = plan(real, 24 * GIB, expert_slots=100)
    assert found.slots == 100 and not found.shortfall_bytes and found.total_bytes < plan(real).total_bytes
    over = plan(real, 24 * GIB, expert_slots=400)
    assert over.slots == 400 and over.shortfall_bytes
    assert remedies(over).slots == plan(real).slots


@pytest.mark.parametrize("slots", [0, 1, 9, 513])
def test_slots_that_cannot_be(real, slots):
    with pytest.raises(ValueError, match=f"expert_slots is {slots}; allowed: 10 to "):
        plan(real, 24 * GIB, expert_slots=slots)


def test_a_tiny_arena_is_refused(real):
    """Fewer slots than a token takes: it shows what would be needed and is not run."""
    least = plan(real, 24 * GIB, expert_slots=10).total_bytes
    fits, short = (plan(real, 24 * GIB, memory_bytes=n) for n in (least, least - 1))
    assert fits.require() is fits and fits.slots == 10
    assert short.slots == 10 and short.shortfall_bytes == 1
    with pytest.raises(ValueError, match=r"8.23 GB are needed for 10 experts per layer and a context of 32768"):
        short.require()


def test_a_context_that_cannot_be(real):
    with pytest.raises(ValueError, match="context is 262145; the model's is at most 262144"):
        plan(real, context=262_145)
    for name in ("context", "prefill_step_size"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            Wanted(**{name: 0})


def test_memory_is_the_ceiling(real):
    found = plan(real, 24 * GIB, memory_bytes=12 * 10**9)
    assert 12 * 10**9 - slot_bytes(real) < found.total_bytes <= 12 * 10**9
    assert found.wired_limit_mb is None and not found.is_capped


def test_the_wired_limit_only_where_it_is_needed(real):
    machine = Machine(24 * GIB, 18 * 10**9)
    assert plan(real, machine).wired_limit_mb is None
    below, above = (plan(real, machine, memory_bytes=n) for n in (18 * 10**9, 20 * 10**9))
    assert below.wired_limit_mb is None
    assert above.gpu_bytes <= above.wired_limit_mb << 20 < above.gpu_bytes + (257 << 20)
    assert plan(real, Machine(24 * GIB), memory_bytes=21 * 10**9).wired_limit_mb is None, "no Metal, no limit"


def test_never_swap(real):
    """Whatever is asked for, the system keeps an eighth and 3 GB."""
    for machine in MACHINES[2:]:
        found = plan(real, machine, memory_bytes=machine.memory_bytes)
        assert found.is_capped and not found.shortfall_bytes
        assert found.system_bytes >= max(SYSTEM_BYTES, machine.memory_bytes // 8)


def test_remedies_help(real):
    short = plan(real, 12 * GIB, context=262_144, prefill_step_size=8192)
    found = remedies(short)
    assert short.shortfall_bytes and found.slots is None
    again = plan(real, found.machine_bytes, context=262_144, prefill_step_size=8192)
    assert not again.shortfall_bytes and again.slots >= 10

    narrow = Machine(16 * GIB, 10_300_000_000)  # beyond Metal's advice
    short = plan(real, narrow, context=131_072)
    found = remedies(short)
    assert short.shortfall_bytes and found.context == 65536 and found.step == 1024
    assert not plan(real, narrow, context=found.context).shortfall_bytes
    assert not plan(real, narrow, context=131_072, prefill_step_size=found.step).shortfall_bytes
    wired = plan(real, narrow, context=131_072, memory_bytes=found.memory_bytes)
    assert not wired.shortfall_bytes and wired.wired_limit_mb is not None


def test_all_in_memory_where_experts_do_not_stream(real):
    sizes = dataclasses.replace(real, streamed=False)
    assert sizes.slot_bytes == sum(real.records) and plan(sizes, 64 * GIB).slots == 512
    short = plan(sizes, 24 * GIB)
    assert short.slots == 512 and short.shortfall_bytes


def test_the_draft_layer(real):
    without = dataclasses.replace(real, records=real.records[:48], mtp_bytes=0)
    assert not without.drafts and plan(without).parts["mtp"] == 0 and plan(without).slots > plan(real).slots
    assert plan(real).parts["mtp"] - real.mtp_bytes == plan(real).parts["kv"] // 12
    for count in (47, 50):
        with pytest.raises(ValueError, match=f"experts of {count} layers; needed: 48, or 49"):
            dataclasses.replace(real, records=(1,) * count)


def test_the_row_cache_is_no_larger_than_the_table(real):
    assert plan(real).row_cache_bytes == 64 << 20
    assert plan(dataclasses.replace(real, table_bytes=1000)).row_cache_bytes == 1000


def test_the_published_costs():
    """24 KiB of keys and values per token, 113 MB of states."""
    config = ModelConfig.from_dict(real_config())
    index = 128 * 2 * (32768 // 4 + 3)
    assert 12 * sparse_cache_bytes(config, 32768, 2) == 24 * 1024 * 32768 + 12 * index
    assert state_bytes(config, 2) == 36 * (48 * 128 * 128 * 4 + 3 * 10240 * 2) + 9 * 10240 * 2 + 8


@pytest.mark.parametrize("length", [3, 255, 256, 257, 700])
def test_caches_are_as_large_as_planned(model, length):
    cache = model.make_cache()
    for start in range(0, length, 200):
        mx.eval(model(mx.array(tokens(length))[None, start : start + 200], cache=cache))
    config = model.config
    attention = config.layer_types.count("full_attention")
    want = attention * sparse_cache_bytes(config, length, 4) + state_bytes(config, 4)
    assert sum(layer.nbytes for layer in cache) == want


@pytest.mark.parametrize(("length", "step"), [(300, 128), (700, 512)])
def test_prompts_stay_within_the_workspace(model, length, step):
    """Also beyond the attention budget, where queries gather their keys."""
    cache, ids = model.make_cache(), tokens(length).tolist()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    process_prompt(ids, model, cache, step)
    peak = mx.get_peak_memory() - before - sum(layer.nbytes for layer in cache)
    assert peak < 1.05 * workspace_bytes(model.config, step, 4, length)


def test_longer_steps_take_more_workspace(real):
    sizes = [workspace_bytes(real.config, step, 2, 32768) for step in (1, 512, 2048, 8192)]
    assert sizes == sorted(set(sizes)) and sizes[2] > 1 << 30


def test_the_plan_knows_attentions_tiles():
    """Each module has them, since neither may know the other."""
    planned = (sizes.TILE_BYTES, sizes.TILE_QUERIES, sizes.TILES_IN_FLIGHT)
    assert planned == (attention.TILE_BYTES, attention.MAX_TILE, attention.TILES_IN_FLIGHT)


def test_attention_within_its_budget_gathers_nothing(real):
    budget = real.config.indexer_budget + real.config.indexer_compress_ratio - 1
    sizes = [workspace_bytes(real.config, 512, 2, context) for context in (512, 1024, budget, budget + 1, 1 << 18)]
    assert sizes[:4] == sorted(set(sizes[:4])) and sizes[3] == sizes[4] > sizes[2] + (1 << 27)
    scores = 2 * 2 * real.config.num_attention_heads * 512
    assert sizes[1] - sizes[0] == scores * 512, "of all heads, before and after softmax"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    raw = tiny_config(num_hidden_layers=4)
    return load_model(write(tmp_path_factory.mktemp("m"), raw, random_weights(raw)), dtype=mx.float32)[0]


def test_buffers_double():
    assert [key_capacity(n) for n in (0, 1, 256, 257, 512, 50_000)] == [0, 256, 256, 512, 512, 65536]


@pytest.mark.parametrize(
    ("text", "count"),
    [("12GB", 12 * 10**9), ("11.5GiB", 23 << 29), ("800MB", 8 * 10**8), ("24 gib", 24 << 30), ("512KiB", 1 << 19),
     ("0.125GB", 125_000_000)],
)  # fmt: skip
def test_sizes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "12", "GB", "0GB", "-1GB", "1e3GB", "12 TB", "1.2345GB", "12GBs", "9999999GB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"is not a size such as 12GB") as error:
        parse_bytes(text)
    assert "\n" not in str(error.value)


def test_light_and_without_mlx():
    code = "import sys, mlx_moe.paging.plan, mlx_moe.paging.estimate, mlx_moe.cli.plan; "
    code += "assert not {'mlx.core', 'numpy', 'transformers', 'huggingface_hub'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_process_is_not_the_gpus(real):
    found = plan(real)
    assert found.total_bytes - found.gpu_bytes == PROCESS_BYTES + found.row_cache_bytes
