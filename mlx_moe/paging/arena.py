"""The arena: MLX arrays in which experts' records stand, and the slots in them.

A record takes whole pages of 16 KiB and is named by a slot word (custom_kernels/slots.py): chunk << 28 | page. Records
of several sizes share the chunks; neighbouring free pages are one free stretch again, whatever stood in them.

Chunks are arrays [bytes / 16, 16], since an axis of MLX ends at 2^31. Records start at multiples of 16 KiB in memory
(on a CPU 8 bytes after, where MLX's buffers start 8 bytes after a multiple of 16).

**Hazard.** MLX cannot order a write of bytes against a read that is still pending: whoever writes to a slot must first
have evaluated every graph that may read it, and hand the slot's word to no graph before the write is complete. The
arena cannot see graphs, so its callers keep this rule. Chunks are written through NumPy views only: assigning to an MLX
slice copies the whole chunk while anything else refers to it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from custom_kernels.dequant_gemv import Arena
from custom_kernels.dequant_gemv.reference import ALIGNMENT, MAX_CHUNKS
from custom_kernels.slots import PAGE_BYTES

MAX_CHUNK_BYTES = 8 << 30


def pages_of(nbytes: int) -> int:
    """Pages that a record of this many bytes takes."""
    return -(-nbytes // PAGE_BYTES)


def chunk_pages(records: Iterable[tuple[int, int]], most_pages: int) -> list[int]:
    """Pages of each chunk when records are put into chunks one after the other, none across two.

    Args:
        records: (bytes, count) of records of one size, in the order in which they are allocated.
        most_pages: that a chunk may have.

    Raises ValueError when they do not fit into the chunks that an arena may have.
    """
    records, out = list(records), [0]
    for nbytes, count in records:
        size = pages_of(nbytes)
        while count:
            fit = min(count, (most_pages - out[-1]) // size)
            out[-1] += fit * size
            count -= fit
            if count:
                out.append(0)
            if len(out) > MAX_CHUNKS or size > most_pages:
                total = sum(nbytes * count for nbytes, count in records)
                most = MAX_CHUNKS * most_pages * PAGE_BYTES
                raise ValueError(f"experts of {_gb(total)} do not fit into an arena; at most {_gb(most)} do")
    return out


def arena_pages(
    records: Iterable[tuple[int, int]], budget_bytes: int, most_chunk_bytes: int = MAX_CHUNK_BYTES
) -> list[int]:
    """Pages of each chunk that an arena allocates; arguments as for SlotArena, and so the ValueError."""
    pages = [count + 1 for count in chunk_pages(records, min(most_chunk_bytes, MAX_CHUNK_BYTES) // PAGE_BYTES - 1)]
    total = sum(pages) * PAGE_BYTES  # a page more in each, since MLX aligns as it likes
    if total > budget_bytes:
        raise ValueError(f"experts take {_gb(total)} in memory, and {_gb(max(budget_bytes, 0))} are left for them")
    return pages


class SlotArena:
    """Up to four chunks of memory, and which of their pages are free."""

    def __init__(
        self, records: Iterable[tuple[int, int]], budget_bytes: int, most_chunk_bytes: int = MAX_CHUNK_BYTES
    ) -> None:
        """Room for records of these (bytes, count), filled with zeros.

        Args:
            budget_bytes: what all chunks together may take.
            most_chunk_bytes: what one may take.

        Raises ValueError, before anything is allocated, when the records do not fit.
        """
        pages = arena_pages(records, budget_bytes, most_chunk_bytes)
        chunks = tuple(mx.zeros((count * PAGE_BYTES // ALIGNMENT, ALIGNMENT), dtype=mx.uint8) for count in pages)
        mx.eval(chunks)
        self._views = [np.array(chunk, copy=False).reshape(-1) for chunk in chunks]
        self._arena = Arena(chunks, tuple(map(_base, self._views)))
        self._free = [[(0, count - 1)] if count > 1 else [] for count in pages]  # per chunk, ascending (page, pages)
        self._used: dict[int, int] = {}  # word: pages

    @property
    def arena(self) -> Arena:
        """The chunks as kernels take them."""
        return self._arena

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(view.nbytes for view in self._views)

    def allocate(self, nbytes: int) -> int:
        """The word of a slot for a record: the first free pages that are enough. Raises ValueError when none are."""
        size = pages_of(nbytes)
        for chunk, free in enumerate(self._free):
            for i, (page, count) in enumerate(free):
                if count >= size:
                    free[i : i + 1] = [(page + size, count - size)] if count > size else []
                    word = chunk << 28 | page
                    self._used[word] = size
                    return word
        raise ValueError(f"the arena of {_gb(self.nbytes)} has no room for a record of {nbytes} bytes")

    def free(self, word: int) -> None:
        """Give a slot back. Raises ValueError for a word that is not in use."""
        start, end = self._pages(word)
        stretches = self._free[word >> 28]
        i = bisect.bisect(stretches, (start, 0))
        first = last = i
        if i and sum(stretches[i - 1]) == start:
            first, start = i - 1, stretches[i - 1][0]
        if i < len(stretches) and stretches[i][0] == end:
            last, end = i + 1, sum(stretches[i])
        stretches[first:last] = [(start, end - start)]
        del self._used[word]

    def view(self, word: int, nbytes: int) -> np.ndarray:
        """The first ``nbytes`` of a slot, to be written: uint8 [nbytes].

        See the hazard above. Raises ValueError for a word that is not in use or a record that is larger than its slot.
        """
        start, end = self._pages(word)
        if pages_of(nbytes) > end - start:
            raise ValueError(f"a record of {nbytes} bytes is larger than slot {word:#010x} of {end - start} pages")
        first = self._arena.bases[word >> 28] + start * PAGE_BYTES
        return self._views[word >> 28][first : first + nbytes]

    def _pages(self, word: int) -> tuple[int, int]:
        """The first page of a slot in its chunk, and the one after its last."""
        if word not in self._used:
            raise ValueError(f"slot {word:#010x} is not in use")
        page = word & 0x0FFFFFFF
        return page, page + self._used[word]


def _base(view: np.ndarray) -> int:
    """The first byte of a chunk that is aligned in memory, as near as multiples of ``ALIGNMENT`` come."""
    return -(-(-view.ctypes.data % PAGE_BYTES) // ALIGNMENT) * ALIGNMENT


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
