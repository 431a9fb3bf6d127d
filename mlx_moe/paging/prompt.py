"""The order in which a prompt brings a layer's experts to memory: group by group, the next while one is computed.

Groups follow from the prompt alone, so that products, and with them their rounding, do not depend on what is in memory.
A group may be larger than the room that a layer has: it then comes in parts. Experts that are in memory are used where
they stand. The others go through places of the layer's own, first those of experts that the prompt does not need, then
of those that it is done with, the least used first, last of those that come latest. So no expert is read twice for one
piece of a prompt, and afterwards the experts that it used most are in memory, as the newest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mlx_moe.paging.flow import Flow

AHEAD_SHARE = 3
"""Of a layer's places, one in so many may be filled with what a prompt will probably need, before its ids are known.

That is as much as one of the two parts that have room beside it, which the device computes meanwhile.
"""
WINDOW_AHEAD_SHARE = 8
"""Of them, one in so many may be filled with what a window will probably need."""


class PromptReads:
    """One layer's experts for one piece of a prompt."""

    def __init__(self, pager: Flow, layer: int, groups: Sequence[np.ndarray], counts: Mapping[int, int]) -> None:
        """groups: experts in the order in which they are used. counts: tokens of each."""
        self._pager, self._layer, self._counts = pager, layer, counts
        slots = pager.slots(layer)
        # Two parts, and what was read ahead and comes later, have room at the same time.
        size = max(1, (slots - slots // AHEAD_SHARE) // 2)
        complete = pager.complete(layer)
        if complete:
            size = max(map(len, groups))
        cut = [_cut(group.tolist(), size) for group in groups]
        self._parts = [(part, part is parts[-1]) for parts in cut for part in parts]
        self._part_of = {expert: i for i, (part, _) in enumerate(self._parts) for expert in part}
        self._double = 2 * size <= slots
        if not complete:
            pager.use_all(layer, list(self._part_of))

    def parts(self) -> Iterator[tuple[list[int], bool]]:
        """Experts whose records are in memory until the next are asked for, and whether they are the last of a group.

        The caller queues what reads them, and hands it to ``Pager.reads``, before it goes on.
        """
        for i, (experts, last) in enumerate(self._parts):
            self._fetch(i, i)
            if self._double and i + 1 < len(self._parts):
                self._fetch(i + 1, i)
            self._pager.arrive(self._layer, experts)
            yield experts, last
        self._pager.touch(self._layer, sorted(self._counts, key=lambda expert: (self._counts[expert], expert)))

    def _fetch(self, part: int, current: int) -> None:
        if not self._pager.complete(self._layer):
            self._pager.fetch(self._layer, self._parts[part][0], self._victims(part, current))

    def _victims(self, part: int, current: int) -> list[int]:
        """Who may leave for a part while ``current`` is in use, the first first."""
        at = {expert: self._part_of.get(expert) for expert in self._pager.leaving(self._layer)}
        free = [expert for expert, i in at.items() if i is None]
        done = [expert for expert, i in at.items() if i is not None and i < current]
        later = [expert for expert, i in at.items() if i is not None and i > part]
        done.sort(key=lambda expert: (self._counts[expert], expert))
        later.sort(key=lambda expert: (-self._part_of[expert], expert))
        return free + done + later


def _cut(group: list[int], size: int) -> list[list[int]]:
    return [group[i : i + size] for i in range(0, len(group), size)]
