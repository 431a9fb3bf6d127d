"""Bytes of experts from files into memory that others own, by threads of its own. Knows no MLX.

Demanded records go before speculative ones. A record that comes alone is read in several pieces at once; of many at a
time the pieces are longer, since every read costs a thread its turn at Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from mlx_moe.paging.files import Direct, Files
from mlx_moe.paging.index import ExpertIndex
from mlx_moe.paging.queue import Job, JobQueue, Piece, Together
from mlx_moe.paging.waits import Waits

__all__ = ["MOST_BYTES", "PIECE_BYTES", "THREADS", "Direct", "ExpertReader", "Files", "Fill", "can_be_direct"]

THREADS = 12
"""More than the eight reads that keep an SSD busy, since some threads always wait for their turn at Python."""
PIECE_BYTES = 512 << 10
"""Reads are not split below this, a multiple of every alignment that direct reads need."""
MOST_BYTES = 2 * PIECE_BYTES
"""Of one read by a thread, so that what is read is copied while more is read."""


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
        self.queue = JobQueue(threads, "experts")
        self.waits = Waits()  # of who computes with what is read

    def read(self, layer: int, expert: int, target: np.ndarray) -> None:
        """Put one expert's record into ``target``, uint8 [record_bytes]; raises OSError naming file and expert."""
        pieces, check = self._pieces(layer, expert, target, target.nbytes)
        for piece in pieces:
            piece()
        check()

    def start(self, fill: Fill, demanded: bool = True, beside: int = 1, together: Together | None = None) -> Job:
        """Let the threads read one expert; the job's ``wait`` raises OSError naming file and expert.

        Args:
            beside: how many are started at about the same time, this one among them.
            together: of the queue, where they start with its ``go``.
        """
        share = -(-beside * fill.target.nbytes // self._threads)  # of a thread, when all take part
        pieces, check = self._pieces(*fill, min(MOST_BYTES, -(-share // PIECE_BYTES) * PIECE_BYTES))
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
        self.files.close()

    def _pieces(self, layer: int, expert: int, target: np.ndarray, most: int) -> tuple[list[Piece], Piece]:
        """Reads of at most so many bytes each, and the check that must follow them."""
        what, files, parts = f"expert {expert} of layer {layer}", self.files, self._index.reads(layer, expert)
        pieces = [
            files.piece(
                part.file,
                part.offset + start,
                target[part.at + start : part.at + min(start + most, part.length)],
                what,
            )
            for part in parts
            for start in range(0, part.length, most)
        ]
        return pieces, partial(files.check, dict.fromkeys(part.file for part in parts), what)
