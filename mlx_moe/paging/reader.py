"""Bytes of experts from files into memory that others own, by threads of its own. Knows no MLX.

Demanded records go before speculative ones. A record that comes alone is read in several pieces at once; of many at a
time the pieces are longer. The threads are those of a small C library (``native_reads.py``) or, where it was not
built, Python's (``queue.py``), to which every read costs a turn at Python's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlx_moe.paging.files import Direct, Files
from mlx_moe.paging.index import ExpertIndex
from mlx_moe.paging.native_reads import NativeQueue, OpenFiles, Parts, library
from mlx_moe.paging.queue import Job, JobQueue, Piece, Together
from mlx_moe.paging.waits import Waits

__all__ = ["MOST_BYTES", "PIECE_BYTES", "THREADS", "Direct", "ExpertReader", "Files", "Fill", "can_be_direct"]

THREADS = 12
"""More than the eight reads that keep an SSD busy, since some of Python's threads always wait for their turn."""
PIECE_BYTES = 512 << 10
"""Reads are not split below this, a multiple of every alignment that direct reads need."""
MOST_BYTES = 2 * PIECE_BYTES
"""Of one read by a thread, so that what is read is copied while more is read."""
MANY_PIECES, MOST_PIECES = 32, 64
"""Of jobs of many small reads Python's threads run several in a row, but not too many before something more urgent."""


class Fill(NamedTuple):
    """One expert to read: which, and the uint8 [record_bytes] that it goes to."""

    layer: int
    expert: int
    target: np.ndarray


def can_be_direct(index: ExpertIndex, alignment: int) -> bool:
    """Whether any read of the index starts at a multiple of ``alignment`` in its file and is one long."""
    return any(
        part.offset % alignment == 0 and (part.length >= PIECE_BYTES or part.length % alignment == 0)
        for layer, entry in enumerate(index.layers)
        for expert in range(entry.experts)
        for part in index.reads(layer, expert)
    )


class ExpertReader:
    """Reads experts by layer and number, as an index says where they are.

    Targets belong to the reader until the job of a ``start`` has ended. Nobody may write to them meanwhile.
    """

    def __init__(self, index: ExpertIndex, threads: int = THREADS, direct: Direct | None = None) -> None:
        """direct: see Files."""
        self._index, self._threads, self.files = index, threads, Files(direct)
        self._sets: list[OpenFiles] = []
        self._experts = self.file_set(index.files)
        functions = library()
        self.queue = JobQueue(threads, "experts") if functions is None else NativeQueue(functions, threads)
        self.waits = Waits()  # of who computes with what is read

    def file_set(self, paths: Sequence[Path]) -> OpenFiles:
        """Files by number, for ``Parts``; opened when they are first read."""
        self._sets.append(OpenFiles(self.files, paths))
        return self._sets[-1]

    def read(self, layer: int, expert: int, target: np.ndarray) -> None:
        """Put one expert's record into ``target``, uint8 [record_bytes]; raises OSError naming file and expert."""
        for piece in self._pieces(self._parts(layer, expert, target, target.nbytes)):
            piece()
        _check(self.files, self._index, layer, expert)

    def start(self, fill: Fill, demanded: bool = True, beside: int = 1, together: Together | None = None) -> Job:
        """Let the threads read one expert; the job's ``wait`` raises OSError naming file and expert.

        Args:
            beside: how many are started at about the same time, this one among them.
            together: of the queue, where they start with its ``go``.
        """
        share = -(-beside * fill.target.nbytes // self._threads)  # of a thread, when all take part
        parts = self._parts(*fill, min(MOST_BYTES, -(-share // PIECE_BYTES) * PIECE_BYTES))
        check = partial(_check, self.files, self._index, fill.layer, fill.expert)
        return self.submit(parts, demanded, check, together)

    def submit(
        self, parts: Parts, demanded: bool = True, check: Piece | None = None, together: Together | None = None
    ) -> Job:
        """Let the threads read some parts; see JobQueue."""
        if isinstance(self.queue, NativeQueue):
            return self.queue.submit(parts, demanded, check, together)
        pieces = self._pieces(parts)
        at_once = min(MOST_PIECES, 1 + len(pieces) // MANY_PIECES)
        if at_once > 1:
            pieces = [partial(_run, pieces[i : i + at_once]) for i in range(0, len(pieces), at_once)]
        return self.queue.submit(pieces, demanded, check, together)

    def fill(self, fills: Iterable[Fill]) -> Iterator[int]:
        """Read many; yields the bytes of each when it is there. The threads end with it.

        After an error, or when the caller stops early, running reads end, no further one starts, and the error is
        raised.
        """
        todo, running = iter(fills), deque()
        try:
            while True:
                while len(running) < 2 * self._threads and (fill := next(todo, None)):
                    running.append((self.start(fill, beside=2 * self._threads), fill.target.nbytes))
                if not running:
                    return
                job, nbytes = running.popleft()
                job.wait()
                yield nbytes
        finally:
            self.queue.stop()

    def close(self) -> None:
        """End the threads and close the files; reading again starts and opens them again."""
        self.queue.stop()
        for files in self._sets:
            files.forget()
        self.files.close()

    def _parts(self, layer: int, expert: int, target: np.ndarray, most: int) -> Parts:
        """Raises ValueError for a target of another size."""
        if target.nbytes != self._record_bytes[layer]:
            raise ValueError(f"{target.nbytes} bytes for a record of {self._record_bytes[layer]}, layer {layer}")
        return Parts(self._experts, self._index.tables[layer][expert], target, most, partial(_name, layer, expert))

    @cached_property
    def _record_bytes(self) -> list[int]:
        return [layer.record_bytes for layer in self._index.layers]

    def _pieces(self, parts: Parts) -> list[Piece]:
        return [
            self.files.piece(
                parts.files.paths[number],
                offset + start,
                parts.target[at + start : at + min(start + parts.most, length)],
                parts.name(number, offset),
            )
            for number, offset, length, at in parts.table.tolist()
            for start in range(0, length, parts.most)
        ]


def _check(files: Files, index: ExpertIndex, layer: int, expert: int) -> None:
    numbers = index.tables[layer][expert, :, 0].tolist()
    files.check(dict.fromkeys(index.files[i] for i in numbers), _name(layer, expert))


def _name(layer: int, expert: int, *_: int) -> str:
    return f"expert {expert} of layer {layer}"


def _run(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        piece()
