"""Which experts stand in a layer's places: least recently used or least worth goes first, what a window uses stays.

Pure bookkeeping, a function of the calls alone: no arrays of MLX, no disk, no clock. A place is a number below
``slots``; what stands there is the pager's business.

Order: used experts go to the newest end when their window is committed, in token order; before that, and for ever if
their rows are rejected, what was loaded stands at the oldest end. So the order depends on accepted tokens only.

Whoever is worth least leaves first where a layer is given a ``rank`` (of paging.usage.LayerUsage, which learns from
accepted tokens too); the older one where two are worth the same, and so without it.

Invariants: an expert has one place and a place one expert; pinned and hidden experts are never evicted (a window needs
the first, a read into memory is under way for the others); hidden ones do not count as present until ``show``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Rank = Callable[[list[int]], list[int]]
"""Puts experts, given with the oldest first, in the order in which they leave memory; the older one of equals first."""


@dataclass
class Counters:
    """Of one layer, since it was made.

    Attributes:
        hits, misses: experts that a window or prompt found in memory, and that it did not; each once per use.
        evictions: experts that lost their place to another.
        ahead_useful, ahead_wasted: experts that were read ahead and then used, or evicted unused.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    ahead_useful: int = 0
    ahead_wasted: int = 0


class Admission(NamedTuple):
    """An expert that got a place, and the one that had to leave it."""

    expert: int
    place: int
    evicted: int | None


class LayerPolicy:
    """The places of one layer."""

    def __init__(self, slots: int, counters: Counters | None = None, rank: Rank | None = None) -> None:
        """counters: to go on with. rank: who leaves first; by age alone if not given.

        Raises ValueError for less than one slot.
        """
        if slots < 1:
            raise ValueError(f"a layer has {slots} slots; needed: at least 1")
        self.slots = slots
        self.counters = counters or Counters()
        self._rank = rank
        self._order: OrderedDict[int, int] = OrderedDict()  # expert: place, oldest first
        self._free = list(range(slots - 1, -1, -1))
        self._pinned: set[int] = set()
        self._hidden: set[int] = set()
        self._ahead: set[int] = set()  # read ahead and not used so far

    @property
    def experts(self) -> list[int]:
        """Those that have a place, the oldest first."""
        return list(self._order)

    @property
    def leaving(self) -> list[int]:
        """Those that have a place, in the order in which they would leave."""
        experts = self.experts
        if self._rank is None:
            return experts
        return self._rank(experts)

    @property
    def hidden(self) -> frozenset[int]:
        """Those whose place is being filled."""
        return frozenset(self._hidden)

    def place(self, expert: int) -> int:
        """Where an expert stands; it must have a place."""
        return self._order[expert]

    def room(self) -> int:
        """How many experts could be admitted now."""
        return self.slots - sum(e in self._pinned or e in self._hidden for e in self._order)

    def use(self, experts: Sequence[int], pin: bool = True) -> list[int]:
        """A window or prompt needs these, each named once, in order of first use; returns those that are not present.

        pin: keep them until ``release``, those that are admitted later too.
        """
        missing = [e for e in experts if e not in self._order or e in self._hidden]
        self.counters.misses += len(missing)
        self.counters.hits += len(experts) - len(missing)
        used = self._ahead.intersection(experts)
        self.counters.ahead_useful += len(used)
        self._ahead -= used
        if pin:
            self._pinned.update(experts)
        return missing

    def admit(
        self, experts: Sequence[int], victims: Iterable[int] | None = None, stay: Collection[int] = ()
    ) -> list[Admission]:
        """Places for experts that have none, in this order, at the oldest end; hidden until ``show``.

        Args:
            victims: who leaves first; as ``leaving`` by default. Pinned ones stay unless they are named here.
            stay: experts that do not leave.

        Returns:
            One for each expert, fewer where no place is left.
        """
        leaving, out = self._who_may_leave(victims, stay), []
        for expert in experts:
            evicted = None
            if not self._free:
                evicted = next(leaving, None)
                if evicted is None:
                    break
                self._evict(evicted)
            place = self._free.pop()
            self._order[expert] = place
            self._order.move_to_end(expert, last=False)
            self._hidden.add(expert)
            out.append(Admission(expert, place, evicted))
        return out

    def ahead(self, experts: Iterable[int], most: int, stay: Collection[int] = ()) -> list[Admission]:
        """Places for experts that may be needed soon: not pinned, hidden, no more than ``most`` of them at a time.

        stay: experts that do not leave for them.
        """
        absent = [e for e in experts if e not in self._order]
        out = self.admit(absent[: max(0, most - len(self._hidden))], stay=stay)
        self._ahead.update(admission.expert for admission in out)
        return out

    def show(self, expert: int) -> None:
        """An admitted expert is in memory now."""
        self._hidden.remove(expert)

    def forget(self, expert: int) -> None:
        """An expert could not be read, or is not wanted any more: its place is free again."""
        self._free.append(self._order.pop(expert))
        self._hidden.discard(expert)
        self._ahead.discard(expert)

    def touch(self, experts: Iterable[int]) -> None:
        """These were used, in this order; those without a place do not count."""
        for expert in experts:
            if expert in self._order:
                self._order.move_to_end(expert)

    def release(self) -> None:
        """Nothing is pinned any more."""
        self._pinned.clear()

    def keep(self, experts: Iterable[int]) -> None:
        """Of those that have a place, keep these in their order; nothing is pinned or hidden."""
        kept = set(experts)
        self._order = OrderedDict((e, place) for e, place in self._order.items() if e in kept)
        self._free = sorted(set(range(self.slots)) - set(self._order.values()), reverse=True)
        self._ahead &= kept
        self._hidden.clear()
        self._pinned.clear()

    def _who_may_leave(self, victims: Iterable[int] | None, stay: Collection[int]) -> Iterator[int]:
        """See ``admit``. Nothing is sorted before the first is asked for."""
        pinned = self._pinned if victims is None else frozenset()
        for expert in self.leaving if victims is None else victims:
            if expert in self._order and not (expert in pinned or expert in self._hidden or expert in stay):
                yield expert

    def _evict(self, expert: int) -> None:
        self.counters.evictions += 1
        self.counters.ahead_wasted += expert in self._ahead
        self._ahead.discard(expert)
        self._free.append(self._order.pop(expert))
