"""Replays of recorded routing: the engine's own counters to the last hit, bounds that hold, rules that decide."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from checkpoints import random_weights, write
from disks import read_with, slow
from mlx_moe import MoceConfig, load_model
from mlx_moe.generation import generate_tokens
from mlx_moe.models.qwen4_exp import Model
from mlx_moe.paging.drafts import MTP_ACCEPTANCE, draft_windows, tokens_per_pass
from mlx_moe.paging.replay import POLICIES, ReplayResult, ReplaySettings, learned_start, recorded_settings, replay
from mlx_moe.paging.replay_bound import bound, furthest_first
from mlx_moe.paging.statistics import ExpertStats
from mlx_moe.paging.synthetic import synthetic_trace
from mlx_moe.paging.trace import Pass, Trace, read_trace
from paging.streamed import EXPERTS, IDS, TOP_K, greedy, opened, write_model
from tiny_tokenizer import short_config

ROOT = Path(__file__).resolve().parent.parent.parent
MOCES = (None, MoceConfig(), MoceConfig(3.0, 0, None, measure=True))
RUN = (30, 1, 1, -4, 8, 12, -8, 1)
"""Prompts longer than a window, single tokens, windows; of those with a minus half is rejected."""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("replay") / "m.gguf", mtp=True)


@pytest.fixture(scope="module")
def recorded(path, tmp_path_factory) -> Trace:
    """An exact run of the tiny model with 8 of 40 experts in memory, read-ahead on."""
    file = tmp_path_factory.mktemp("recorded") / "t"
    with opened(path, 8, record_routing=file) as model:
        run(model, np.tile(IDS, 3))
    return read_trace(file)


def run(model: Model, ids: np.ndarray, batch: int = 1, pieces: tuple[int, ...] = RUN) -> None:
    """A text in pieces."""
    cache, at = model.make_cache(), 0
    for piece in pieces:
        count = abs(piece)
        rows = mx.array(np.stack([np.roll(ids, i)[at : at + count] for i in range(batch)]))
        if piece < 0:
            model.begin(cache)
        mx.eval(model(rows, cache=cache))
        if piece < 0:
            model.commit(cache, count // 2)
        at += count // 2 if piece < 0 else count
    model._experts.commit(1 << 20)


def agree(found: ReplayResult, stats: ExpertStats, model: Model) -> None:
    """Every counter, and for each layer who stands in memory, in order."""
    counters = found.counters
    assert tuple(c.hits for c in counters) == stats.layer_hits
    assert tuple(c.misses for c in counters) == stats.layer_misses
    assert sum(c.evictions for c in counters) == stats.evictions
    assert sum(c.ahead_useful for c in counters) == stats.ahead_useful
    assert sum(c.ahead_wasted for c in counters) == stats.ahead_wasted
    assert found.bytes_read == stats.bytes_read
    assert tuple(found.picks) == stats.layer_picks and tuple(found.substituted) == stats.layer_substituted
    assert found.present == [model._experts._pager.present(i) for i in range(len(counters))]


def compared(model: Model, file: Path, text) -> Trace:
    """Run ``text(model)`` of a model that records, then compare."""
    before = model.experts_stats
    text(model)
    stats = model.experts_stats.since(before)
    present = [model._experts._pager.present(i) for i in range(len(stats.layer_hits))]
    pager = model._experts._pager
    model.close()
    trace = read_trace(file)
    pager.present = lambda layer: present[layer]
    agree(replay(trace, recorded_settings(trace)), stats, model)
    assert stats.hits and stats.misses and not trace.cut
    return trace


# Against the engine


@pytest.mark.sample(2)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("threads", "delay_s"), [(8, 0.0), (1, 0.0003)])
@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("moce", MOCES, ids=["exact", "default", "uncapped"])
@pytest.mark.parametrize("slots", [4, 5, 8, 10, 20, 39])
def test_the_tiny_model_agrees(path, tmp_path, monkeypatch, slots, moce, read_ahead, threads, delay_s, batch):
    file = tmp_path / "t"
    options = {"moce": moce, "read_ahead": read_ahead, "io_threads": threads, "record_routing": file}
    model = opened(path, slots, **options)
    if delay_s:
        slow(monkeypatch, delay_s)
    compared(model, file, lambda model: run(model, np.tile(IDS, 3), batch))


@pytest.mark.full
@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("moce", MOCES, ids=["exact", "default", "uncapped"])
@pytest.mark.parametrize("slots", [8, 10, 20])
def test_the_demonstration_model_agrees(tmp_path, slots, moce, read_ahead):
    file, ids = tmp_path / "t", np.random.default_rng(slots).integers(5, 2000, 100)
    options = {"moce": moce, "read_ahead": read_ahead, "eviction": "lru" if read_ahead else "frequency"}
    model = load_model(None, expert_slots=slots, record_routing=file, **options)[0]
    trace = compared(model, file, lambda model: run(model, ids, pieces=(20, 1, -4, 8, 1, 9, 1, 1)))
    assert trace.header.whole and trace.header.trunk == 8 and trace.passes[0].prompt


@pytest.mark.parametrize("moce", [None, MOCES[2]], ids=["exact", "uncapped"])
def test_learned_eviction_agrees(path, tmp_path, moce):
    """From nothing, and from what the run before learned."""
    for start in (None, "usage"):
        file = tmp_path / str(start)
        model = opened(path, 8, usage=True, moce=moce, seed_residency=start, record_routing=file)
        trace = compared(model, file, lambda model: run(model, np.tile(IDS, 3)))
        assert trace.header.eviction == "frequency" and (trace.header.start_counts is None) == (start is None)
    lru = replay(trace, replace(recorded_settings(trace), policy="lru"))
    assert lru.hits != replay(trace, recorded_settings(trace)).hits


def test_generated_text_and_drafts_agree(path, tmp_path):
    """The loop over tokens, and passes of the draft layer between."""
    file = tmp_path / "t"

    def text(model: Model) -> None:
        greedy(model, 12)
        cache, drafts = model.make_cache(), model.mtp.make_cache()
        ids = mx.array(IDS[None, :12])
        for i in range(0, 12, 3):
            _, s = model.forward(ids[:, i : i + 3], cache)
            for _ in range(2):
                logits, s = model.draft(s[:, -1:], ids[:, :1], drafts)
            mx.eval(logits)
        model._experts.commit(8)

    trace = compared(opened(path, 6, record_routing=file), file, text)
    assert any([entry.layer for entry in event.layers] == [trace.header.trunk] for event in trace.passes)


def test_a_resize_and_an_interruption_are_followed(path, tmp_path, monkeypatch):
    """What stands in memory afterwards is recorded; a pass that was given up is none."""
    file = tmp_path / "t"
    model = opened(path, 8, record_routing=file)
    run(model, IDS, pieces=(12, 1))
    real = os.preadv

    def fails(*arguments):
        raise OSError(5, "Input/output error")

    read_with(monkeypatch, fails)
    with pytest.raises(OSError, match="Input/output"):
        run(model, np.roll(IDS, 7), pieces=(20,))
    read_with(monkeypatch, real)
    before = model.experts_stats
    run(model, IDS, pieces=(1, 8, 1))
    stats = model.experts_stats.since(before)
    present = [model._experts._pager.present(i) for i in range(5)]
    model.resize_experts(10)
    run(model, IDS, pieces=(3,))
    model.close()
    trace = read_trace(file)
    assert [event.tokens for event in trace.passes] == [12, 1, 1, 8, 1, 3]
    states = [i for i, event in enumerate(trace.events) if not isinstance(event, Pass)]
    assert states == [0, 3, 7] and {slots for slots, _ in trace.events[7].layers} == {10}
    rest = replace(trace, events=trace.events[3:7])
    found = replay(rest, ReplaySettings(8))
    assert tuple(c.hits for c in found.counters) == stats.layer_hits and found.present == present
    whole = replay(replace(trace, events=trace.events[:7]), ReplaySettings(8))
    assert whole.present == present, "followed where the recording says so"


@pytest.mark.full
def test_two_thousand_tokens_replay_within_a_minute(tmp_path):
    """And agree; a prompt of 700 tokens and 1,300 generated."""
    file, ids = tmp_path / "t", np.random.default_rng(0).integers(5, 2000, 700).tolist()

    def text(model: Model) -> None:
        assert sum(1 for _ in generate_tokens(ids, model, max_tokens=1300)) == 1300
        model._experts.commit(1)

    model = load_model(None, expert_slots=10, moce=MoceConfig(), record_routing=file)[0]
    trace = compared(model, file, text)
    assert sum(event.accepted for event in trace.passes) >= 2000
    start = time.perf_counter()
    trace = read_trace(file)
    replay(trace, recorded_settings(trace))
    assert time.perf_counter() - start < 60


def test_recording_changes_nothing(path, tmp_path):
    with opened(path, 8) as plain, opened(path, 8, record_routing=tmp_path / "t") as model:
        assert greedy(plain, 8) == greedy(model, 8)
        assert plain.experts_stats.as_dict()["layer_hits"] == model.experts_stats.as_dict()["layer_hits"]


def test_all_in_memory(path, tmp_path, recorded):
    """Routing alone is recorded then; its logits, and replays without read-ahead, are those of the run that streams."""
    file = tmp_path / "t"
    with opened(path, record_routing=file) as model:
        run(model, np.tile(IDS, 3))
        assert model.experts_stats.misses == 0
    trace = read_trace(file)
    with pytest.raises(ValueError, match="all experts in memory; name a number of slots"):
        recorded_settings(trace)
    assert trace.header.fingerprint == recorded.header.fingerprint
    settings = ReplaySettings(8, read_ahead=False)
    empty = [()] * len(trace.header.experts)
    assert replay(trace, settings, empty).counters == replay(recorded, settings).counters
    everything = replay(trace, ReplaySettings(EXPERTS))
    assert everything.hits == everything.misses == everything.bytes_read == 0


def test_model_folders_are_recorded(tmp_path):
    raw = short_config()
    folder = write(tmp_path / "m", raw, random_weights(raw))
    with load_model(folder, mx.float32, record_routing=tmp_path / "t")[0] as model:
        mx.eval(model(mx.array(IDS[None, :12] % 20)))
        mx.eval(model(mx.array(IDS[None, :3] % 20)))
    trace = read_trace(tmp_path / "t")
    assert [event.tokens for event in trace.passes] == [12, 3] and trace.start is None
    found = replay(trace, ReplaySettings(trace.header.top_k))
    assert found.misses > 0 == found.bytes_read


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"record_routing is .*nowhere/t, whose folder does not exist"):
        load_model(None, record_routing=tmp_path / "nowhere" / "t")


@pytest.mark.full
def test_a_killed_run_is_readable(path, tmp_path):
    """Up to its last pass but two, since the last ones are still the device's."""
    file = tmp_path / "t"
    code = (
        "import os, sys, mlx.core as mx; sys.path[:0] = ['tests']; from paging.streamed import *; "
        f"m = opened({str(path)!r}, 8, record_routing={str(file)!r}); c = m.make_cache(); "
        "[mx.eval(m(mx.array(IDS[None, i:i + 1]), cache=c)) for i in range(9)]; os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert len(read_trace(file).passes) == 7


# Rules


def test_no_bonus_is_lru(recorded):
    plain = replay(recorded, ReplaySettings(8))
    for moce in (MoceConfig(0.0), MoceConfig(0.0, 0, None), MoceConfig(1e-12, 0, None)):
        found = replay(recorded, ReplaySettings(8, moce=moce))
        assert found.counters == plain.counters and found.present == plain.present and not sum(found.substituted)


@pytest.mark.parametrize("slots", [4, 6, 10, 20, 39])
def test_no_rule_beats_belady(recorded, slots):
    """Plain routing, nothing read ahead; rules for all layers together have their own bound."""
    best, pooled = bound(recorded, slots), bound(recorded, slots, pooled=True)
    used = replay(recorded, ReplaySettings(slots, read_ahead=False))
    for policy in POLICIES:
        found = replay(recorded, ReplaySettings(slots, policy, read_ahead=False))
        limit = pooled if policy == "global" else best
        assert found.hits <= limit.hits and found.hits + found.misses == limit.hits + limit.misses
        assert policy == "global" or all(
            a.hits <= b.hits for a, b in zip(found.counters, best.counters, strict=True)
        ), policy
    start = learned_start(recorded, slots)
    learned = replay(recorded, ReplaySettings(slots, read_ahead=False), start)
    assert learned.hits <= bound(recorded, slots, start).hits
    assert used.hits < best.hits <= pooled.hits and best.windows.misses <= used.windows.misses


def test_belady_is_the_best_of_all_choices():
    """Every choice of what to keep, on short random sequences of sets."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        requests = [set(rng.choice(6, rng.integers(1, 4), replace=False).tolist()) for _ in range(6)]
        states = {frozenset([0]): 0}
        for needed in requests:
            following: dict[frozenset, int] = {}
            for kept, hits in states.items():
                for after in itertools.combinations(sorted(kept | needed), min(3, len(kept | needed))):
                    key = frozenset(after)
                    following[key] = max(following.get(key, -1), hits + len(kept & needed))
            states = following
        found = furthest_first([sorted(needed) for needed in requests], 3, [0])
        assert sum(map(len, requests)) - sum(found) == max(states.values())


def test_every_rule_decides(recorded):
    """None is another by mistake, and each keeps its places and says the same twice."""
    found = {}
    for policy in POLICIES:
        settings = ReplaySettings(10, policy, hold=20, half_life=4)
        result = replay(recorded, settings)
        assert result.present == replay(recorded, settings).present
        places = list(map(len, result.present))
        assert max(places) <= 10 or (policy == "global" and sum(places) <= 10 * len(places))
        assert all(len(set(layer)) == len(layer) for layer in result.present)
        found[policy] = [c.hits for c in result.counters]
    assert len({tuple(hits) for hits in found.values()}) == len(POLICIES)
    longer = replay(recorded, ReplaySettings(10, "lfu-decay", half_life=4000))
    assert [c.hits for c in longer.counters] != found["lfu-decay"]
    assert [c.hits for c in replay(recorded, ReplaySettings(10, "lru+hold", hold=1)).counters] != found["lru+hold"]


def test_a_learned_fill_helps(recorded):
    """From the same recording: the first uses hit."""
    start = learned_start(recorded, 20)
    assert all(len(layer) == len(set(layer)) <= 20 for layer in start)
    first = replace(recorded, events=recorded.events[:2])
    assert replay(first, ReplaySettings(20), start).hits > 0 == replay(first, ReplaySettings(20)).hits


def test_substitution_and_its_price(recorded):
    """More bonus: more hits, more substituted, more error; never what is not recorded to be worth it."""
    found = [replay(recorded, ReplaySettings(8, moce=MoceConfig(b, 1, None))) for b in (0.05, 0.3, 1.0, 5.0)]
    for name in ("relative_error", "substituted_share", "hit_rate"):
        series = [getattr(result, name) for result in found]
        assert series == sorted(series) and series[0] < series[-1], name
    assert replay(recorded, ReplaySettings(8, moce=MoceConfig(5.0, TOP_K))).relative_error == 0
    assert not found[0].limited


def test_few_ranks_limit_what_is_promoted(recorded):
    """Of a recording with few ranks the replay says so, and agrees where the cap lies within them."""

    def cut(found):  # fmt: skip
        return None if found is None else type(found)(found.ids[:, :12], found.logits[:, :12], found.total)

    events = [
        replace(e, layers=tuple(x._replace(routed=cut(x.routed), guess=cut(x.guess)) for x in e.layers))
        if isinstance(e, Pass)
        else e
        for e in recorded.events
    ]
    trace = replace(recorded, header=replace(recorded.header, kept=12), events=tuple(events))
    for cap, limited in ((12, False), (None, True), (24, True)):
        result = replay(trace, ReplaySettings(8, moce=MoceConfig(2.0, 1, cap)))
        assert result.limited == limited
        want = replay(recorded, ReplaySettings(8, moce=MoceConfig(2.0, 1, cap if cap == 12 else 12)))
        assert result.counters == want.counters and result.error == pytest.approx(want.error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 3}, "slots are 3; allowed: at least 4, as a token uses"),
        ({"slots": 8, "moce": MoceConfig(max_rank=2)}, "moce max_rank is 2"),
        ({"slots": 8, "policy": "fifo"}, "policy is 'fifo'; allowed: lru"),
        ({"slots": 8, "hold": 0}, "hold is 0; allowed: 1 or more"),
        ({"slots": 0}, "slots is 0; allowed: 1 or more"),
    ],
)
def test_settings_that_cannot_be(recorded, settings, message):
    with pytest.raises(ValueError, match=message):
        replay(recorded, ReplaySettings(**settings))


# Drafts


def test_windows_of_drafts():
    """Rows, acceptance, order: every token is accepted once."""
    trace = synthetic_trace(2, (100, 100), tokens=40)
    for acceptance, sizes in (((1.0, 1.0), {3}), ((0.0,), {1}), (MTP_ACCEPTANCE, {1, 2, 3})):
        windows = draft_windows(trace, acceptance).passes
        assert sum(event.accepted for event in windows) == 40
        assert {event.accepted for event in windows[:-1]} <= sizes
        at = 0
        for event in windows:
            for row in range(event.tokens):
                assert np.array_equal(event.layers[1].routed.ids[row], trace.passes[at + row].layers[1].routed.ids[0])
            at += event.accepted
    assert tokens_per_pass((0.5, 0.5)) == 1.75 and tokens_per_pass(()) == 1
    with pytest.raises(ValueError, match="acceptance is"):
        draft_windows(trace, (1.1,))
    assert draft_windows(trace, ()).passes[3].tokens == 1


def test_extra_rows_bring_their_own_experts():
    trace = synthetic_trace(2, (100, 100), tokens=60)
    one, three = (
        replay(t, ReplaySettings(80, read_ahead=False)).windows for t in (trace, draft_windows(trace, (1, 1)))
    )
    assert one.passes == 3 * three.passes and one.tokens == three.tokens
    assert 2 * one.used_bytes / one.passes < three.used_bytes / three.passes < 3 * one.used_bytes / one.passes


def test_replays_need_no_mlx():
    code = "import sys, mlx_moe.prediction, mlx_moe.paging.replay_bound; assert 'mlx.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
