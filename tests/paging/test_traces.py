"""The pager and the LRU oracle over experts that the demonstration model chose on real text (golden/traces.npz)."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from mlx_moe.paging.index import ExpertIndex, LayerIndex, PartIndex
from mlx_moe.paging.pager import Pager
from mlx_moe.paging.policy import LayerPolicy
from mlx_moe.paging.reader import ExpertReader
from mlx_moe.paging.residency import Room
from mlx_moe.paging.usage import HALF_LIFE, RECENT_HALF_LIFE, RECENT_WEIGHT, SMOOTHING, LayerUsage
from paging.lru_oracle import Oracle

TRACES = np.load(Path(__file__).resolve().parent.parent / "golden" / "traces.npz")
EXPERTS, PART, WINDOW, MOST_AHEAD = 40, 32, 8, 3


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> ExpertIndex:
    file = tmp_path_factory.mktemp("traces") / "x"
    file.write_bytes(bytes(3 * PART * EXPERTS))
    parts = [PartIndex.strided("F32", (1, PART // 4), PART, 0, i * PART, 3 * PART, EXPERTS) for i in range(3)]
    return ExpertIndex((file,), (LayerIndex(*parts),) * len(TRACES["text"]))


def windows(trace: np.ndarray, rng: random.Random):
    """(ids [layers, T, k], accepted): up to 8 tokens of the text, of which some are rejected and come again."""
    at = 0
    while at < trace.shape[1]:
        ids = trace[:, at : at + rng.randint(1, WINDOW)]
        accepted = rng.randint(1, ids.shape[1])
        yield ids, accepted
        at += accepted


def _run(pager: Pager, layer: int, ids: np.ndarray) -> None:
    pager.row(layer)
    _, missing = pager.use(layer, ids)
    for wave in pager.waves(layer, missing):
        pager.arrive(layer, wave)


def _run_oracle(oracle: Oracle, ids: np.ndarray) -> None:
    todo = oracle.use(list(dict.fromkeys(ids.reshape(-1).tolist())))
    while todo:
        room = oracle.slots - sum(entry[1] or entry[0] in oracle.pins for entry in oracle.list)
        wave = []
        for expert in todo:
            loading = oracle.find(expert) is not None
            if not loading and not room:
                break
            room -= not loading
            wave.append(expert)
        if not wave:
            oracle.pins = []
        oracle.insert([expert for expert in wave if not oracle.find(expert)])
        oracle.show(wave)
        todo = todo[len(wave) :]


@pytest.mark.sample(4)
@pytest.mark.parametrize("slots", [6, 8, 12, 20, 39])
@pytest.mark.parametrize("name", TRACES.files)
def test_the_engine_agrees_with_the_oracle(index, monkeypatch, name, slots):
    """Hits, misses, read-ahead, and for each layer who was evicted and who stands there, in their order."""
    trace, rng = TRACES[name].astype(np.int64), random.Random(slots)
    evicted = defaultdict(list)
    evict = LayerPolicy._evict
    monkeypatch.setattr(LayerPolicy, "_evict", lambda self, e: evicted[self].append(e) or evict(self, e))
    pager = Pager(index, slots, Room(1 << 30), ExpertReader(index, 2))
    oracles = [Oracle(slots) for _ in index.layers]
    last = trace[:, 0]
    for ids, accepted in windows(trace, rng):
        pager.begin(1, ids.shape[1])
        for layer, oracle in enumerate(oracles):
            oracle.show([entry[0] for entry in oracle.list if entry[1]])
            if layer:  # what the text used last, as a guess
                pager.ahead(layer, last[layer].tolist(), MOST_AHEAD)
                oracle.read_ahead(list(dict.fromkeys(last[layer].tolist())), MOST_AHEAD)
            _run(pager, layer, ids[layer])
            _run_oracle(oracle, ids[layer])
        pager.commit(accepted)
        for layer, oracle in enumerate(oracles):
            oracle.commit(ids[layer, :accepted].reshape(-1).tolist())
            assert pager.present(layer) == [entry[0] for entry in oracle.list]
        last = ids[:, accepted - 1]
    stats = pager.statistics()
    assert [evicted[entry.policy] for entry in pager._layers] == [oracle.log for oracle in oracles]
    assert stats.layer_hits == tuple(o.hits for o in oracles) and stats.layer_misses == tuple(o.misses for o in oracles)
    assert (stats.ahead_useful, stats.ahead_wasted) == (sum(o.useful for o in oracles), sum(o.wasted for o in oracles))
    assert stats.ahead_useful > 0 < stats.evictions == sum(len(o.log) for o in oracles)
    pager.close()


def _shares(tokens: list[list[int]], start: np.ndarray, k: int) -> list[float]:
    """What every expert is worth after these tokens, from the definition: ages of uses, one by one."""
    long, recent = start * 0.5 ** (len(tokens) / HALF_LIFE), np.zeros(EXPERTS)
    for age, chosen in enumerate(reversed(tokens)):
        long[chosen] += 0.5 ** (age / HALF_LIFE)
        recent[chosen] += 0.5 ** (age / RECENT_HALF_LIFE)
    recent *= RECENT_WEIGHT * (1 - 0.5 ** (1 / RECENT_HALF_LIFE))
    return (long / (long.sum() / k + SMOOTHING) + recent).tolist()


@pytest.mark.sample(2)
@pytest.mark.parametrize("slots", [8, 12, 20])
@pytest.mark.parametrize("name", TRACES.files)
def test_least_used_leaves_first(index, name, slots):
    """Who stands there after each of 60 tokens, against the definition; every other one is rejected."""
    trace, rng = TRACES[name][:, :120].astype(np.int64), np.random.default_rng(slots)
    k, starts = trace.shape[-1], rng.uniform(0, 40, (len(trace), EXPERTS))
    usage = [LayerUsage(EXPERTS, start, k) for start in starts]
    pager = Pager(index, slots, Room(1 << 30), ExpertReader(index, 2), usage, by_worth=True)
    stand, seen = [set() for _ in trace], [[] for _ in trace]
    for at in range(60):
        pager.begin(1, 1)
        for layer, row in enumerate(trace[:, at]):
            _run(pager, layer, row[None])
            needed, worth = set(row.tolist()), _shares(seen[layer], starts[layer], k)
            while len(stand[layer] | needed) > slots:
                stand[layer].remove(min(stand[layer] - needed, key=worth.__getitem__))
            stand[layer] |= needed
            assert set(pager.present(layer)) == stand[layer]
            if at % 2 == 0:
                seen[layer].append(row.tolist())
        pager.commit(1 - at % 2)
    pager.close()
