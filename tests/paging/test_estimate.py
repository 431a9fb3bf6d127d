"""Expected speed: the curve, every term, and what each speed changes."""

from __future__ import annotations

import dataclasses

import pytest

from mlx_moe.config import ModelConfig
from mlx_moe.paging.device import Speeds
from mlx_moe.paging.estimate import Expectation, expect, hit_rate
from mlx_moe.paging.plan import Machine, Wanted, plan_memory
from mlx_moe.paging.sizes import ModelSizes
from real_geometry import real_config

AIR = Speeds(6.5e9, 132e9)
RECORD = 1_868_800


def sizes(record: int = RECORD) -> ModelSizes:
    config = ModelConfig.from_dict(real_config())
    return ModelSizes(config, 3_760_000_000, 3_300_000_000, 0, (record,) * 48, 1440, 28_800_000_000)


def expected(speeds: Speeds = AIR, memory: int = 24 << 30, record: int = RECORD, **wanted) -> Expectation:
    return expect(plan_memory(sizes(record), Machine.simulated(memory), Wanted(**wanted)), speeds)


@pytest.mark.parametrize(
    ("slots", "rate"), [(0, 0), (93, 0.435), (186, 0.62), (279, 0.72), (372, 0.789), (512, 1), (46.5, 0.2175)]
)
def test_the_curve(slots, rate):
    assert hit_rate(slots, 512) == pytest.approx(rate)


def test_the_curve_rises():
    rates = [hit_rate(slots, 512) for slots in range(513)]
    assert rates == sorted(rates) and rates[511] < 0.85 and rates[512] == 1


def test_the_curve_goes_by_the_share_of_experts():
    assert hit_rate(40, 64) == pytest.approx(hit_rate(320, 512))


def test_the_terms():
    """By hand, on one token."""
    found = expected(expert_slots=93)
    experts = 480 * RECORD
    assert found.cold_bytes == experts + 1440
    assert found.read_bytes == pytest.approx(0.565 * experts + 1440, abs=1)
    assert found.dense_s == 3.3e9 / 132e9 and found.experts_s == experts / 132e9
    assert found.misses_s == pytest.approx(found.read_bytes / 6.5e9)
    assert found.waits_s == pytest.approx(48 * 190e-6)
    device = found.dense_s + found.experts_s + found.states_s + found.waits_s
    assert found.token_s == pytest.approx(device + found.misses_s)
    assert found.overlapped_s == max(device, found.misses_s) < found.token_s


def test_about_eight_tokens_at_86_slots():
    """0.69 GB of experts per token: 0.41 GB miss, and the SSD takes most of the time."""
    found = expected(Speeds(5e9, 132e9), record=1_437_500, expert_slots=86)
    assert found.read_bytes == pytest.approx(0.412e9, rel=0.02)
    assert 1 / found.token_s == pytest.approx(8, rel=0.1)


@pytest.mark.parametrize(
    ("field", "value", "terms"),
    [
        ("ssd_bytes_s", 3e9, {"misses_s", "prefill"}),
        ("memory_bytes_s", 50e9, {"dense_s", "experts_s", "states_s"}),
        ("wait_s", 60e-6, {"waits_s"}),
    ],
)
def test_each_speed_changes_its_terms(field, value, terms):
    before, after = expected(), expected(dataclasses.replace(AIR, **{field: value}))
    changed = {f.name for f in dataclasses.fields(before) if getattr(before, f.name) != getattr(after, f.name)}
    assert changed == terms


def test_prompts_read_every_expert_once_per_piece():
    found = {piece.step: piece for piece in expected().prefill}
    once = 48 * 512 * RECORD
    assert {step: piece.pieces for step, piece in found.items()} == {2048: 5, 4096: 3, 8192: 2}
    for piece in found.values():
        assert piece.read_bytes == piece.pieces * once and piece.read_s == piece.read_bytes / 6.5e9


def test_all_in_memory_reads_and_waits_for_nothing():
    found = expected(memory=128 << 30, record=1_100_000)
    assert found.hit_rate == 1 and found.waits_s == 0 and found.read_bytes == 1440
    assert all(piece.read_bytes == 0 for piece in found.prefill)


def test_longer_contexts_carry_more():
    assert expected(context=262_144).states_s > expected(context=1000).states_s > 2 * 113e6 / 132e9


@pytest.mark.parametrize("speeds", [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_speeds_that_cannot_be(speeds):
    with pytest.raises(ValueError, match="above 0"):
        Speeds(*speeds)
