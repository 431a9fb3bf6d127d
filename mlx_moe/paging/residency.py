"""What the pager knows of one layer: slot words, places, reads under way, and graphs that read places.

The row of slot words is NumPy's, and enters graphs as fresh arrays only. Invariant: an expert has a word in the row
only while its place holds its whole record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from custom_kernels.slots import NO_SLOT
from mlx_moe.paging.policy import Counters, LayerPolicy
from mlx_moe.paging.queue import Job
from mlx_moe.paging.sizes import CHUNK_BYTES
from mlx_moe.paging.usage import LayerUsage

if TYPE_CHECKING:
    import mlx.core as mx


class Room(NamedTuple):
    """Memory for the arena: bytes in all, and of one chunk."""

    budget_bytes: int
    most_chunk_bytes: int = CHUNK_BYTES


class Limits(Protocol):
    """What is told how much memory the arena takes."""

    def hold(self, arena_bytes: int) -> None:
        """From now on."""

    def release(self) -> None:
        """None any more; may be called again."""

    def pressed(self) -> bool:
        """Whether the arena should shrink now, since the system is short of memory."""


class Load(NamedTuple):
    """A read under way into an expert's place (None where nothing is read), and the pass that started it.

    early: ahead, and to stand in the row when its layer is reached in the same pass.
    """

    job: Job | None
    number: int
    ahead: bool
    early: bool = False


@dataclass(eq=False)
class Readers:
    """Graphs that read places, and the pass that queued them.

    Their arrays stay in memory while they are here, so large ones are replaced by what is made of them.
    """

    graphs: list[mx.array]
    places: frozenset[int]
    number: int

    def become(self, graph: mx.array) -> None:
        """``graph`` depends on all of them, and stands for them from now on."""
        self.graphs = [graph]


class Layer:
    """What is known about one layer's places."""

    def __init__(
        self,
        experts: int,
        record_bytes: int,
        words: list[int],
        counters: Counters | None,
        usage: LayerUsage | None = None,
        by_worth: bool = False,
    ) -> None:
        """usage: what is learned here, if anything. by_worth: whether who leaves follows from it."""
        self.record_bytes = record_bytes
        self.words = words  # of the places
        self.row = np.full(experts, NO_SLOT, dtype=np.uint32)
        self.absent = experts  # how many have no word in the row
        self.policy = LayerPolicy(len(words), counters, usage.leaving if usage is not None and by_worth else None)
        self.usage = usage
        self.loads: dict[int, Load] = {}  # by expert
        self.readers: list[Readers] = []
        self.used: list[np.ndarray] = []  # ids [n, k] of the pass
        self.prompted: list[np.ndarray] = []  # and those of a prompt, which are touched when they are used

    def learn(self, ids: np.ndarray) -> None:
        """Accepted tokens used the experts ``ids`` [n, k]."""
        if self.usage is not None:
            self.usage.add(ids)

    def show(self, expert: int) -> None:
        """The expert's whole record stands in its place."""
        self.row[expert] = self.words[self.policy.place(expert)]
        self.absent -= 1
        self.policy.show(expert)

    def hide(self, expert: int) -> None:
        """The expert's place is another's now."""
        self.row[expert] = NO_SLOT
        self.absent += 1

    def reset(self) -> None:
        """After an interruption at any point: what is in the row and has a place stays, and nothing else."""
        self.policy.keep(e for e in self.policy.experts if self.row[e] != NO_SLOT)
        kept, row = self.policy.experts, self.row
        self.row = np.full_like(row, NO_SLOT)
        self.row[kept] = row[kept]
        self.absent = self.row.size - len(kept)
        self.used.clear()
        self.prompted.clear()
