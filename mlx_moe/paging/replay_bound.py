"""The most hits that any rule of eviction could have had: Belady's, offline, for the plain router.

Each window or prompt asks for a set of experts at once. What is not needed for longest leaves; an expert need not stay
after its use. With sets and with that freedom it is still the optimum: an expert is hit iff it stays from one use to
the next, and of such stretches too many at a moment, dropping the one that ends last loses least. Read-ahead may beat
it, since it brings what was not asked for; and rules for all layers together have their own bound (``pooled``).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mlx_moe.paging.policy import Counters
from mlx_moe.paging.replay import ReplayResult, Tally
from mlx_moe.paging.trace import Pass, Trace

NEVER = 1 << 62


class Request(NamedTuple):
    """What is needed at once, each once; of which layer, and whether a window asks."""

    layer: int
    items: tuple[Hashable, ...]
    window: bool


def furthest_first(requests: Sequence[Iterable[Hashable]], slots: int, start: Iterable[Hashable] = ()) -> list[int]:
    """Misses of each request under Belady's rule with so many places, of which ``start`` fills some."""
    following, seen = [], {}
    for at in range(len(requests) - 1, -1, -1):
        following.append({item: seen.get(item, NEVER) for item in requests[at]})
        seen.update(dict.fromkeys(requests[at], at))
    following.reverse()
    kept = {item: seen.get(item, NEVER) for item in start}
    heap, misses = [(-when, i, item) for i, (item, when) in enumerate(kept.items())], []
    heapq.heapify(heap)
    count = len(heap)
    for needed in following:
        misses.append(sum(item not in kept for item in needed))
        for item, when in needed.items():
            kept[item] = when
            heapq.heappush(heap, (-when, count, item))
            count += 1
        while len(kept) > slots:
            when, _, item = heapq.heappop(heap)
            if kept.get(item) == -when:
                del kept[item]
    return misses


def bound(trace: Trace, slots: int, start: Sequence[Sequence[int]] | None = None, pooled: bool = False) -> ReplayResult:
    """Hits and misses under Belady's rule, in layers that do not have all experts in memory; nothing is read ahead.

    Args:
        start: as for ``Replay.run``.
        pooled: places belong to all layers together.
    """
    header, recorded = trace.header, trace.start
    if start is None:
        start = [present for _, present in recorded.layers] if recorded is not None else [()] * len(header.experts)
    layers = [i for i, experts in enumerate(header.experts) if slots < experts]
    found = ReplayResult([Counters() for _ in header.experts], [0] * len(header.experts), [0] * len(header.experts))
    requests = [request for request in _requests(trace, found.windows) if request.layer in layers]
    groups = [layers] if pooled else [[layer] for layer in layers]
    for group in groups:
        mine = [request for request in requests if request.layer in group]
        first = [(i, expert) for i in group for expert in list(start[i])[-slots:]]
        misses = furthest_first([request.items for request in mine], slots * len(group), first)
        for request, missed in zip(mine, misses, strict=True):
            _count(found, request, missed, header.record_bytes[request.layer])
    return found


def _requests(trace: Trace, windows: Tally) -> Iterable[Request]:
    header = trace.header
    for event in trace.events:
        if not isinstance(event, Pass):
            continue
        if not event.prompt and any(entry.layer < header.trunk for entry in event.layers):
            windows.passes += 1
            windows.tokens += event.batch * event.accepted
        for entry in event.layers:
            ids = entry.routed.ids[:, : header.top_k]
            step = len(ids) if event.prompt else header.window
            for i in range(0, len(ids), step):
                experts = np.unique(ids[i : i + step]).tolist()
                yield Request(entry.layer, tuple((entry.layer, e) for e in experts), not event.prompt)


def _count(found: ReplayResult, request: Request, missed: int, record_bytes: int) -> None:
    hits = len(request.items) - missed
    found.counters[request.layer].hits += hits
    found.counters[request.layer].misses += missed
    found.bytes_read += missed * record_bytes
    if request.window:
        windows = found.windows
        windows.waits += 1
        windows.hits, windows.misses = windows.hits + hits, windows.misses + missed
        windows.used_bytes += len(request.items) * record_bytes
        if missed:
            windows.demanded[missed, record_bytes] += 1
