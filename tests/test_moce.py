"""Cache-aware routing in models that stream: off by default, a function of tokens and residency only, and counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.moce_route import NO_SLOT, plain_route
from disks import slow
from mlx_moe import MoceConfig
from mlx_moe.paging.routing import WindowRouter, divergence
from paging.streamed import EXPERTS, IDS, LAYERS, TOP_K, greedy, logits, opened, write_model

SLOTS = 10
MOCE = MoceConfig(measure=True)
RUN = (12, 1, 8, 10, 3)
"""Prompts, single tokens and windows."""
ONES = (1,) * 6


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("moce") / "m.gguf")


@pytest.fixture(scope="module")
def exact(path):
    """Logits, text and counters without it."""
    with opened(path, SLOTS) as model:
        return observed(model)


def observed(model) -> tuple:
    """All that may not depend on the disk."""
    cache, parts, start = model.make_cache(), [], 0
    ids = np.tile(IDS, 2)
    for piece in RUN:
        parts.append(np.array(model(mx.array(ids[None, start : start + piece]), cache=cache)[0]))
        start += piece
    text = greedy(model, 4)
    counters = {name: value for name, value in model.experts_stats.as_dict().items() if not name.endswith("_ms")}
    present = [model._experts._pager.present(i) for i in range(LAYERS)]
    return np.concatenate(parts), text, counters, present


def same(a: tuple, b: tuple) -> bool:
    return np.array_equal(a[0], b[0]) and a[1:] == b[1:]


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bonus": -0.1}, "moce bonus is -0.1; allowed: 0 or more"),
        ({"bonus": float("nan")}, "moce bonus is nan"),
        ({"bonus": float("inf")}, "moce bonus is inf"),
        ({"bonus": "0.5"}, "moce bonus is 0.5"),
        ({"keep_top": -1}, "moce keep_top is -1; allowed: 0 or more"),
        ({"keep_top": 1.5}, "moce keep_top is 1.5; needed: a whole number"),
        ({"keep_top": None}, "moce keep_top is None; needed: a whole number"),
        ({"max_rank": 0}, "moce max_rank is 0; allowed: 1 or more"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        MoceConfig(**settings)


def test_a_rank_below_what_a_token_uses(path):
    with pytest.raises(ValueError, match="moce max_rank is 3; allowed: at least 4, as a token uses"):
        opened(path, SLOTS, moce=MoceConfig(max_rank=3))
    with pytest.raises(ValueError, match="moce is 3; needed: a MoceConfig, True, or None"):
        opened(path, SLOTS, moce=3)


# Output


def test_no_bonus_is_the_plain_router(path, exact):
    """Byte for byte, counters too."""
    for settings in ({"bonus": 0.0}, {"bonus": 0.0, "measure": True, "keep_top": 0, "max_rank": None}):
        with opened(path, SLOTS, moce=MoceConfig(**settings)) as model:
            assert same(observed(model), exact), settings


def test_experts_that_are_all_in_memory_are_not_preferred(path):
    with opened(path) as plain, opened(path, moce=MoceConfig(bonus=3.0)) as model:
        assert np.array_equal(logits(model), logits(plain)) and greedy(model) == greedy(plain)
        stats = model.experts_stats
        assert stats.substituted == sum(stats.layer_picks) == 0 and stats.agreement is None


def test_prompts_take_the_plain_router(path):
    """Up to the first window, logits are those without it."""
    prompt = mx.array(np.tile(IDS, 2)[None, :60])
    with opened(path, SLOTS) as plain, opened(path, SLOTS, moce=MoceConfig(bonus=3.0)) as model:
        caches = [m.make_cache() for m in (plain, model)]
        for _ in range(2):
            assert mx.array_equal(plain(prompt, cache=caches[0]), model(prompt, cache=caches[1]))
        one = prompt[:, :1]
        assert not mx.array_equal(plain(one, cache=caches[0]), model(one, cache=caches[1]))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("read_ahead", "slowest_s"), [(True, 0.003), (False, 0.001), pytest.param(True, 0.02, marks=pytest.mark.full)]
)
def test_output_and_counters_do_not_depend_on_the_disk(path, exact, monkeypatch, read_ahead, slowest_s):
    """Reads that take random times, one to eight threads: the same logits, text, counters and residents."""
    found = []
    for threads, delay in ((8, 0.0), (1, slowest_s / 4), (8, slowest_s))[: 3 if read_ahead else 2]:
        with opened(path, SLOTS, io_threads=threads, read_ahead=read_ahead, moce=MOCE) as model:
            slow(monkeypatch, delay, seed=threads)
            found.append(observed(model))
            monkeypatch.undo()
    assert all(same(found[0], other) for other in found[1:])
    counters = found[0][2]
    assert counters["substituted"] > 25 and (counters["ahead_useful"] > 0) == read_ahead
    assert not np.array_equal(found[0][0], exact[0]) and counters["misses"] < exact[2]["misses"]


def test_what_a_prompt_gives_up_leaves_no_trace(path, monkeypatch):
    """Bug: a read ahead that the prompt did not need stayed in memory if the disk was fast, and was dropped if not."""
    found = []
    for delay in (0.0, 0.01):
        with opened(path, EXPERTS - 2, io_threads=1) as model:
            monkeypatch.setattr(
                model._experts, "_guess", lambda layer, x: mx.arange(EXPERTS)[None] if layer < LAYERS else None
            )
            slow(monkeypatch, delay)
            mx.eval(model.streams(mx.array(IDS[None, :9])))
            stats = model.experts_stats
            found.append(([model._experts._pager.present(i) for i in range(LAYERS)], stats.bytes_read, stats.misses))
            monkeypatch.undo()
    assert found[0] == found[1]


def test_the_state_at_the_start_decides(path):
    """Two runs from the same residency agree; from another one text may differ, and here it does."""
    with opened(path, SLOTS, moce=MOCE) as model, opened(path, SLOTS, moce=MOCE) as other:
        first, again = logits(model, ONES), logits(other, ONES)
        assert np.array_equal(first, again) and not np.array_equal(first, logits(model, ONES))


# Each setting


def picked(moce: MoceConfig, resident: list[int], values: mx.array) -> list[int]:
    config = SimpleNamespace(num_experts_per_tok=TOP_K, norm_topk_prob=True)
    words = np.full(EXPERTS, NO_SLOT, dtype=np.uint32)
    words[resident] = np.arange(len(resident))
    return WindowRouter(config, [EXPERTS], moce).route(0, values, mx.array(words)).ids[0].tolist()


def test_every_setting_counts():
    """Logits fall by 0.1 per rank, so that a bonus of 0.85 lifts a resident past eight others."""
    values = mx.array(-0.1 * np.arange(EXPERTS, dtype=np.float32))[None]
    resident = [5, 6, 7, 11, 30]
    assert picked(MoceConfig(), resident, values) == [0, 1, 2, 5]
    assert picked(MoceConfig(keep_top=0), resident, values) == [5, 6, 7, 0]
    assert picked(MoceConfig(bonus=0.15), resident, values) == [0, 1, 2, 3]
    assert picked(MoceConfig(bonus=0.85, max_rank=5), resident, values) == [0, 1, 2, 3]
    assert picked(MoceConfig(bonus=9), [30], values) == [0, 1, 2, 3]
    assert picked(MoceConfig(bonus=9, max_rank=None), [30], values) == [0, 1, 2, 30]


def test_the_read_ahead_follows_the_same_rule(path):
    """Its guess prefers experts in memory too."""
    with opened(path, SLOTS, moce=MoceConfig(bonus=3.0)) as model:
        logits(model, ONES)
        experts, rng = model._experts, np.random.default_rng(0)
        x = mx.array(rng.standard_normal((8, experts._routers[1].weight.shape[1])), dtype=mx.float32)
        row = experts._pager.row(1)
        biased = experts._guess(1, x, True)
        want = experts._windows.route(1, experts._routers[1](x[None])[0].astype(mx.float32), row).ids
        plain = experts._guess(1, x)
        assert mx.array_equal(biased, want) and not mx.array_equal(biased, plain)


# Counters


def test_counters_of_a_window(path):
    """Picks, substitutions and divergence are those of the windows' own logits, rows and ids."""
    want = {"picks": 0, "substituted": 0, "kl": 0.0, "gained": 0}
    with opened(path, SLOTS, moce=MOCE) as model:
        router, real = model._experts._windows, model._experts._windows.queue

        def queue(layer, values, routing):
            ids, best = np.array(routing.ids), np.array(plain_route(values, TOP_K)[0])
            p = np.array(mx.softmax(values.astype(mx.float32), axis=-1), dtype=np.float64)
            row = model._experts._pager._layers[layer].row
            for chosen, true, share in zip(ids, best, p, strict=True):
                want["picks"] += TOP_K
                want["substituted"] += len(set(chosen) - set(true))
                want["gained"] += int((row[chosen] != NO_SLOT).sum() - (row[true] != NO_SLOT).sum())
                want["kl"] += np.log(share[true].sum() / share[chosen].sum())
            real(layer, values, routing)

        router.queue = queue
        logits(model)
        stats = model.experts_stats
    assert (sum(stats.layer_picks), stats.substituted) == (want["picks"], want["substituted"])
    assert want["gained"] == want["substituted"] > 20, "each substitution is a hit gained"
    assert abs(sum(stats.layer_kl) - want["kl"]) < 1e-4 * want["kl"] and min(stats.layer_kl[:LAYERS]) > 0
    assert stats.agreement == 1 - stats.substituted / sum(stats.layer_picks)
    assert len(stats.agreements) == len(stats.layer_kl) and all(0 < a < 1 for a in stats.agreements)


def test_divergence_is_measured_only_when_asked_and_changes_nothing(path):
    with opened(path, SLOTS, moce=MoceConfig()) as model, opened(path, SLOTS, moce=MOCE) as measured:
        assert np.array_equal(logits(model, ONES), logits(measured, ONES))
        assert sum(model.experts_stats.layer_kl) == 0 < sum(measured.experts_stats.layer_kl)
        assert model.experts_stats.substituted == measured.experts_stats.substituted > 0


def test_divergence_of_the_true_choice_is_nothing():
    values = mx.array(np.random.default_rng(1).standard_normal((5, EXPERTS)), dtype=mx.float32) * 4
    assert divergence(values, plain_route(values, TOP_K)[0]).item() < 1e-5
    worst = mx.argsort(values, axis=-1)[:, :TOP_K]
    assert divergence(values, worst).item() > 10


def test_since(path):
    """Counters of a stretch are those of its windows."""
    with opened(path, SLOTS, moce=MOCE) as model:
        logits(model, ONES)
        before = model.experts_stats
        logits(model, ONES)
        stretch, whole = model.experts_stats.since(before), model.experts_stats
        assert stretch.layer_picks == before.layer_picks
        assert stretch.substituted + before.substituted == whole.substituted
