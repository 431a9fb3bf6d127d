"""Settings as rows of one batch give what a run of each gives: counters, losses, divergences."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from checkpoints import tokens
from mlx_moe import MoceConfig, quality
from mlx_moe.paging import simulated
from mlx_moe.paging.simulated import SimulatedExperts
from mlx_moe.quality import Passage, Score, score, score_at_once
from mlx_moe.runtime import DEMO, load_model
from paging.streamed import EXPERTS, LAYERS, TOP_K, opened, write_model

SLOTS = 6
SETTINGS = (
    None,
    MoceConfig(bonus=1.5, max_rank=None, measure=True),
    MoceConfig(bonus=1.5, keep_top=1, max_rank=6, measure=True),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("simulated") / "m.gguf")


@pytest.fixture(scope="module")
def whole(path):
    """All experts in memory."""
    with opened(path, EXPERTS) as model:
        yield model


def _texts(*counts: int, below: int = 120) -> list[Passage]:
    drawn = (tuple((tokens(count + 1, seed) % below).tolist()) for seed, count in enumerate(counts))
    return [Passage(ids[:-1], ids[1:], 3 * len(ids)) for ids in drawn]


TEXTS = _texts(36, 8)
"""The first runs past the 32 tokens that attention reads."""


def _assert_same(got: Score, want: Score) -> None:
    """Figures that are counted are equal; read-ahead and waits were never simulated."""
    assert np.abs(got.losses / want.losses - 1).max() < 1e-5 and got.size_bytes == want.size_bytes
    a, b = got.experts, want.experts
    for name in ("slots", "layer_hits", "layer_misses", "evictions", "bytes_read", "layer_picks", "layer_substituted"):
        assert getattr(a, name) == getattr(b, name), name
    assert np.allclose(a.layer_kl, b.layer_kl, rtol=1e-4, atol=1e-6)
    assert got.as_dict().keys() == want.as_dict().keys()


@pytest.fixture(scope="module")
def at_once(whole):
    return score_at_once(whole, TEXTS, SETTINGS, SLOTS)


@pytest.mark.parametrize("row", range(len(SETTINGS)))
def test_a_row_is_a_run(path, at_once, row):
    """Of two documents: experts stay in memory from the first to the second, and caches do not."""
    with opened(path, SLOTS, read_ahead=False, moce=SETTINGS[row]) as model:
        _assert_same(at_once[row], score(model, TEXTS))


def test_settings_differ(at_once):
    """Or the comparison above would show little."""
    exact, free, capped = (one.experts for one in at_once)
    assert exact.substituted == 0 == sum(exact.layer_kl) and min(exact.layer_hits[:LAYERS]) > 0
    assert free.misses < capped.misses < exact.misses and free.substituted > capped.substituted > 10
    assert sum(free.layer_kl) > sum(capped.layer_kl) > 0
    assert exact.evictions == exact.misses - LAYERS * SLOTS


def test_more_rows_than_a_window_has_tokens(whole, at_once):
    """Rows do not depend on how many there are, nor on which they are."""
    many = score_at_once(whole, _texts(9), SETTINGS[::-1] * 4, SLOTS)
    few = score_at_once(whole, _texts(9), SETTINGS, SLOTS)
    for i, one in enumerate(many):
        _assert_same(one, few[len(SETTINGS) - 1 - i % len(SETTINGS)])


def test_packed_experts_give_the_same(whole, monkeypatch):
    """Those of models that are too large to be unpacked, and all of them on a GPU."""
    texts = _texts(6)
    want = score_at_once(whole, texts, SETTINGS, SLOTS)
    monkeypatch.setattr(simulated, "UNPACKED_BYTES", 0)
    unpacked = []
    monkeypatch.setattr(whole.experts, "unpacked", unpacked.append)
    for got, one in zip(score_at_once(whole, texts, SETTINGS, SLOTS), want, strict=True):
        _assert_same(got, one)
    assert not unpacked


def test_a_pass_that_failed_leaves_no_trace(whole, monkeypatch):
    """Layers that were done count nothing of it; what follows is as if it had never been."""

    def broken(layer: int, x: mx.array, *_: object) -> mx.array:
        if layer == 2:
            raise OSError("broken")
        return x

    ids, found = tokens(9), []
    for fails in (False, True):
        source, cache = SimulatedExperts(whole.experts, whole.config, SETTINGS, SLOTS), whole.make_cache()
        with whole.taking_experts_from(source):
            for t, token in enumerate(ids):
                window = mx.array([[int(token)]] * len(SETTINGS))
                if fails and t == 7:
                    with monkeypatch.context() as patch, pytest.raises(OSError, match="broken"):
                        patch.setattr(source, "_run", broken)
                        whole(mx.full(window.shape, 5), cache=cache)
                logits = whole(window, cache=cache)
            found.append((np.array(logits), source.statistics()))
    assert np.array_equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_the_models_own_experts_come_back(whole):
    own, seen = whole.experts, []

    def fail(done: int) -> None:
        seen.append(whole.experts is own)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_at_once(whole, TEXTS, SETTINGS, SLOTS, fail)
    assert seen == [False] and whole.experts is own
    assert np.isfinite(np.array(whole(mx.array([[1, 2, 3]]))[0])).all()


def test_interim_scores(whole, monkeypatch):
    """What a long run has so far is the start of what it ends with; bytes of a document go by its tokens."""
    monkeypatch.setattr(quality, "INTERIM_EVERY", 10)
    seen, done = [], []
    last = score_at_once(whole, _texts(15, 10), SETTINGS[:2], SLOTS, done.append, seen.append)
    assert done == list(range(1, 26)) and [one[0].losses.size for one in seen] == [10, 20]
    for scores in seen:
        for one, end in zip(scores, last, strict=True):
            assert np.array_equal(one.losses, end.losses[: one.losses.size])
            assert 0 < one.experts.misses < end.experts.misses and one.as_dict()["bits_per_byte"] > 0
    assert [one[0].size_bytes for one in seen] == [32, 64] and last[0].size_bytes == 81


def test_what_cannot_be_simulated(path, whole):
    def start(slots: int = SLOTS, settings=SETTINGS, model=whole) -> SimulatedExperts:
        return SimulatedExperts(model.experts, model.config, settings, slots)

    for slots in (TOP_K - 1, EXPERTS):
        with pytest.raises(
            ValueError, match=f"{slots} simulated slots per layer; allowed: {TOP_K}, as a token uses, to"
        ):
            start(slots)
    with pytest.raises(ValueError, match="max_rank is 3; allowed: at least 4"):
        start(settings=[None, MoceConfig(max_rank=3)])
    with opened(path, 8) as streamed, pytest.raises(ValueError, match="with all experts in memory"):
        start(model=streamed)
    source = start()
    with pytest.raises(ValueError, match="slots are fixed"):
        source.resize(8)
    for shape in ((2, 1), (3, 2), (1, 1)):
        with whole.taking_experts_from(source), pytest.raises(ValueError, match=r"needed: \(3, 1\), one per setting"):
            whole(mx.ones(shape, dtype=mx.int32))


@pytest.mark.full
def test_the_demonstration_model():
    """Past the 256 tokens that its attention reads, a table of 21 settings beside runs of some of them."""
    grid = [MoceConfig(b, 3, cap, True) for b in (0.2, 0.4, 0.85, 1.5, 3) for cap in (None, 8, 12, 16)]
    settings, texts = [None, *grid], _texts(270, 30, below=8000)
    with load_model(DEMO, resident=True)[0] as model:
        found = score_at_once(model, texts, settings, 10)
    for row in (0, 9, 12, 18):
        with load_model(DEMO, expert_slots=10, read_ahead=False, usage=False, moce=settings[row])[0] as model:
            _assert_same(found[row], score(model, texts))
