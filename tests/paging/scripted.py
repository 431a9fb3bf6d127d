"""A disk and a device whose times are given, on a clock that only they move: what a schedule costs, to the digit.

Work that is waited for is done when it is waited for, or before; nothing here takes real time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import mlx.core as mx

from mlx_moe.paging.queue import Cancelled


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.now = 0.0


class Device:
    """Computes one piece of work after the other."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free, self.busy_s = clock, 0.0, 0.0
        self._ends: dict[int, float] = {}  # of graphs, by identity
        self._graphs: list[mx.array] = []  # or an identity could come again

    def queue(self, graphs: Iterable[mx.array], seconds: float) -> None:
        """From now on, or when what was queued before is done."""
        self._free = max(self._free, self._clock.now) + seconds
        self.busy_s += seconds
        for graph in graphs:
            self._ends[id(graph)] = self._free
            self._graphs.append(graph)

    def wait(self, graph: mx.array | None = None) -> None:
        """For what was queued as this; for all that was queued if it was not, or is None."""
        self._clock.now = max(self._clock.now, self._ends.get(id(graph), self._free))

    def evaluate(self, graphs: list[list[mx.array]]) -> None:
        """In place of mx.eval: waits for these, if they were queued here."""
        ends = [self._ends.get(id(graph), 0.0) for some in graphs for graph in some]
        self._clock.now = max(self._clock.now, *ends, 0.0)
        mx.eval(graphs)


class Disk(NamedTuple):
    """What a read takes: ``latency_s``, of which ``depth`` pass side by side, and then its bytes one after another."""

    latency_s: float
    bytes_per_s: float
    depth: int

    def seconds(self, sizes: Iterable[int]) -> float:
        """For reads that start together, while nothing else is read."""
        lanes, link = [0.0] * self.depth, 0.0
        for nbytes in sizes:
            link = self.end(lanes, 0.0, link, nbytes)
        return max(lanes)

    def end(self, lanes: list[float], start: float, link: float, nbytes: int) -> float:
        """Of one more read, which takes the first lane that is free."""
        lane = lanes.index(min(lanes))
        ready = max(lanes[lane], start) + self.latency_s
        lanes[lane] = max(ready, link) + nbytes / self.bytes_per_s
        return lanes[lane]


class ScriptedJob:
    """What ``ScriptedQueue.submit`` gives."""

    def __init__(self, queue: ScriptedQueue, pieces: list[Callable], check: Callable | None) -> None:
        self._queue, self.pieces, self._check = queue, pieces, check
        self.submitted = self.end = queue.clock.now  # end: of what has started
        self.cancelled = False

    @property
    def ended(self) -> bool:
        self._queue.run(self._queue.clock.now)
        return not self.pieces and self.end <= self._queue.clock.now

    def wait(self) -> None:
        while self.pieces:
            self._queue.next()
        self._queue.clock.now = max(self._queue.clock.now, self.end)
        if self.cancelled:
            raise Cancelled
        if self._check is not None:
            self._check()


class ScriptedQueue:
    """A JobQueue (mlx_moe.paging.queue) whose jobs read from a scripted disk: demanded ones first, in their order."""

    def __init__(self, clock: Clock, disk: Disk, size: Callable[[Callable], int]) -> None:
        """size: a piece -> the bytes that it reads; 0 takes no time."""
        self.clock, self._disk, self._size = clock, disk, size
        self._lanes, self._link = [0.0] * disk.depth, 0.0
        self._demanded: list[ScriptedJob] = []
        self._speculative: list[ScriptedJob] = []

    def submit(self, pieces, demanded=True, check=None, together=None) -> ScriptedJob:
        self.run(self.clock.now)
        job = ScriptedJob(self, list(pieces), check)
        (self._demanded if demanded or together is not None else self._speculative).append(job)
        return job

    def together(self) -> ScriptedQueue:
        return self

    def go(self, together: ScriptedQueue) -> None:
        """They have started already: nothing takes time between."""

    def promote(self, job: ScriptedJob) -> None:
        self.run(self.clock.now)
        if job in self._speculative:
            self._speculative.remove(job)
            self._demanded.append(job)

    def cancel(self, job: ScriptedJob) -> None:
        self.run(self.clock.now)
        job.cancelled = bool(job.pieces)
        job.pieces.clear()

    def stop(self) -> None:
        for job in (*self._demanded, *self._speculative):
            self.cancel(job)

    def run(self, until: float) -> None:
        """Start what has a lane by then."""
        while self._waiting() and min(self._lanes) <= until:
            self.next()

    def next(self) -> None:
        """Start one read, as soon as there is a lane."""
        job = self._waiting()
        piece = job.pieces.pop(0)
        nbytes = self._size(piece)
        if nbytes:
            self._link = job.end = self._disk.end(self._lanes, job.submitted, self._link, nbytes)
        piece()

    def _waiting(self) -> ScriptedJob | None:
        for jobs in (self._demanded, self._speculative):
            while jobs and not jobs[0].pieces:
                jobs.pop(0)
            if jobs:
                return jobs[0]
        return None
