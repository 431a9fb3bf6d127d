"""How many experts per layer stand in memory: from what the user asks for and what the machine has. Knows no MLX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_moe.paging.plan import parse_bytes
from mlx_moe.paging.reader import THREADS

MIN_SLOTS = 1
RESERVE_BYTES = 2 << 30
"""Beside weights and experts: caches, states, unpacked matrices of a prompt, the system; at most an eighth of all."""
IO = ("direct", "buffered")


@dataclass(frozen=True)
class Paging:
    """How experts are kept and read.

    Attributes:
        memory: ceiling of the process, as 10GB or in bytes; None is the machine's.
        expert_slots: experts of every layer that stand in memory; None follows from the ceiling.
        resident: all experts stand in memory, or loading fails.
        io_threads: that read.
        read_ahead: read what the next layer will probably need.
        io: "direct" goes past the page cache and says where it cannot, "buffered" never does; None is direct, quietly.
    """

    memory: str | int | None = None
    expert_slots: int | None = None
    resident: bool = False
    io_threads: int = THREADS
    read_ahead: bool = True
    io: str | None = None

    def __post_init__(self) -> None:
        if self.resident and self.expert_slots is not None:
            raise ValueError("resident and expert_slots were both given; leave one out")
        if self.expert_slots is not None and self.expert_slots < MIN_SLOTS:
            raise ValueError(f"expert_slots is {self.expert_slots}; allowed: {MIN_SLOTS} or more")
        if not 1 <= self.io_threads <= 256:
            raise ValueError(f"io_threads is {self.io_threads}; allowed: 1 to 256")
        if self.io not in (None, *IO):
            raise ValueError(f"io is {self.io!r}; allowed: {', '.join(IO)}")
        if self.memory is not None:
            self._ceiling_bytes()

    def budget_bytes(self, machine_bytes: int, dense_bytes: int) -> int:
        """What the arena may take beside dense weights of this size; negative when nothing is left."""
        ceiling = machine_bytes if self.memory is None else min(self._ceiling_bytes(), machine_bytes)
        return ceiling - dense_bytes - min(RESERVE_BYTES, ceiling // 8)

    def slots(self, experts: int, top_k: int, fits: Callable[[int], bool]) -> int:
        """Slots per layer of ``experts``.

        Args:
            fits: whether so many slots per layer fit into the budget.

        Returns:
            What was asked for, or as many as fit, at least ``top_k`` (the arena refuses those that do not fit).

        Raises ValueError for fewer slots than ``top_k``.
        """
        if self.resident:
            return experts
        if self.expert_slots is not None:
            if self.expert_slots < min(top_k, experts):
                raise ValueError(f"expert_slots is {self.expert_slots}; allowed: at least {top_k}, as a token uses")
            return min(self.expert_slots, experts)
        low, high = min(top_k, experts), experts
        while low < high:  # the most that fit
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def _ceiling_bytes(self) -> int:
        if isinstance(self.memory, str):
            return parse_bytes(self.memory)
        if self.memory < 1:
            raise ValueError(f"memory is {self.memory}; needed: a size, as '10GB' or a number of bytes")
        return self.memory
