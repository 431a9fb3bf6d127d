"""Routing made up after published figures, and what the published model may give with it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mlx_moe.machines import MACHINES
from mlx_moe.paging.estimate import LRU_CURVE
from mlx_moe.paging.moce import MoceConfig
from mlx_moe.paging.replay import ReplaySettings, replay
from mlx_moe.paging.synthetic import TOP_K, synthetic_trace
from mlx_moe.paging.trace import Trace
from mlx_moe.prediction import ROUTERS, Prediction, prediction_table, predictions
from mlx_moe.published import mean_record_bytes, published_config, published_sizes
from real_geometry import real_config


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic_trace(4, (1000,) * 4)


@pytest.fixture(scope="module")
def first() -> list[Prediction]:
    """Exact and cache-aware, without and with drafts."""
    return list(itertools.islice(predictions(MACHINES["m5-air-24"]), 4))


@pytest.fixture(scope="module")
def rows() -> list[Prediction]:
    return list(predictions(MACHINES["m5-air-24"]))


@pytest.mark.parametrize("point", [point for point in LRU_CURVE if point[0]])
def test_it_hits_as_the_published_run(trace, point):
    """Within two points, four layers; with all slots only first uses miss."""
    slots, rate = point
    found = replay(trace, ReplaySettings(min(slots, 511), read_ahead=False))
    assert found.hit_rate == pytest.approx(rate, abs=0.02)


def test_its_logits_are_what_is_published(trace):
    """0.85 is 2.4 times the distance of the first from the third; guesses name 72 % of the experts."""
    top, right = [], []
    for event in trace.passes:
        for entry in event.layers:
            top.append(entry.routed.logits[0, 0] - entry.routed.logits[0, 2])
            right.append(np.isin(entry.routed.ids[0, :TOP_K], entry.guess.ids[0, :TOP_K]).mean())
    assert 0.85 / np.mean(top) == pytest.approx(2.4, rel=0.01) and np.mean(right) == pytest.approx(0.72, abs=0.01)


def test_the_published_model():
    """The same shape as the tests' own, and bytes as its files have."""
    from mlx_moe.config import ModelConfig

    own, other = published_config(), ModelConfig.from_dict(real_config())
    names = [n for n in vars(own) if n not in ("eos_token_ids", "seed", "split_ngram_parts", "ngram_vocab_size_base")]
    assert all(getattr(own, name) == getattr(other, name) for name in names if not name.startswith("_")), names
    sizes = published_sizes(6.1)
    assert sizes.token_expert_bytes == pytest.approx(0.69e9, rel=0.01) and sizes.dense_bytes == pytest.approx(
        3.76e9, rel=0.01
    )
    assert mean_record_bytes() * 480 == pytest.approx(sizes.token_expert_bytes, rel=1e-6)
    assert len(published_sizes(4.5, drafts=False).records) == 48 and published_sizes(4.5, drafts=False).mtp_bytes == 0


@pytest.mark.full
def test_the_whole_table(rows):
    """Dense bits, slots, routers, drafts: each once, with both prices of a wait."""
    assert len({(r.dense, r.slots, r.router, r.drafts) for r in rows}) == len(rows) == 24
    assert all(set(row.times) == {190.0, 60.0} for row in rows)
    table = list(prediction_table(MACHINES["m5-air-24"], rows))
    lines = [line for line in table if line.startswith("|")]
    assert len(lines) == 26 and len({line.count("|") for line in lines}) == 1
    assert ROUTERS["MoCE, default"] == MoceConfig() and sum("MoCE, default" in line for line in lines) == 8


def test_the_terms_add_up(first):
    for row in first:
        slow, fast = row.times[190.0], row.times[60.0]
        waits = 48 + row.drafts
        assert slow.serial_s - fast.serial_s == pytest.approx(waits * 130e-6)
        own = slow.dense_s + slow.experts_s + slow.states_s + slow.waits_s + slow.host_s + slow.misses_s + slow.ahead_s
        drafts = slow.drafts.serial_s if row.drafts else 0
        assert slow.serial_s == pytest.approx(own + drafts) and (drafts > 0) == (row.drafts > 0)
        low, high = slow.tokens_s
        assert 0 < low <= high <= fast.tokens_s[1]


@pytest.mark.full
def test_what_helps_helps(rows):
    """More slots, drafts that are mostly right, fewer dense bits, cheaper waits, and substitution, all else equal."""
    at = {(r.dense, r.slots > 86, r.router, r.drafts): r for r in rows}
    for (dense, many, router, drafts), row in at.items():
        speed = row.times[190.0].tokens_s[0]
        if not many:
            assert at[dense, True, router, drafts].times[190.0].tokens_s[0] > speed
        if dense == "6-bit" and not many:
            assert at["4-bit", many, router, drafts].times[190.0].tokens_s[0] > speed
        if not drafts:
            assert at[dense, many, router, 2].times[190.0].tokens_s[0] > speed
        if router == "exact":
            assert at[dense, many, "MoCE, default", drafts].times[190.0].tokens_s[0] > speed
            assert row.result.relative_error == 0 < at[dense, many, "MoCE, default", drafts].result.relative_error


def test_about_eight_tokens_exact_at_86_slots(first):
    """408 MB miss by the published curve."""
    exact = first[0]
    assert (exact.dense, exact.slots, exact.router, exact.drafts) == ("6-bit", 86, "exact", 0)
    assert exact.read_bytes_per_token == pytest.approx(408e6, rel=0.05)
    assert exact.times[190.0].tokens_s[0] == pytest.approx(8, rel=0.1)


def test_read_ahead_reads_more():
    found = next(predictions(MACHINES["m5-air-24"], read_ahead=True))
    assert found.work.ahead_bytes > 1e8
