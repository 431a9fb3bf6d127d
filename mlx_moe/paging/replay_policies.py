"""Other rules of who leaves memory, to replay recordings with; the engine's own is LayerPolicy. Knows no MLX.

Each is a LayerPolicy whose ``experts`` stand in another order, the first to leave first, so that pins, hidden experts
and prompts work as they do there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

from mlx_moe.paging.policy import Admission, LayerPolicy


class DecayedCounts(LayerPolicy):
    """Least frequently used goes first; a use counts half after ``half_life`` tokens."""

    def __init__(self, slots: int, top_k: int, half_life: int) -> None:
        super().__init__(slots)
        self._grow = 2.0 ** (1 / (top_k * half_life))  # of a use's weight, from one use to the next
        self._weight, self._score = 1.0, {}

    @property
    def experts(self) -> list[int]:
        """Those that have a place, the least used first, the older first where that is equal."""
        return sorted(self._order, key=lambda expert: self._score.get(expert, 0.0))

    def touch(self, experts: Iterable[int]) -> None:
        """See LayerPolicy. All uses count, also of experts without a place."""
        experts = list(experts)
        super().touch(experts)
        for expert in experts:
            self._weight *= self._grow
            self._score[expert] = self._score.get(expert, 0.0) + self._weight
        if self._weight > 1e200:
            self._score = {expert: score / self._weight for expert, score in self._score.items()}
            self._weight = 1.0


class HeldPrompt(LayerPolicy):
    """LRU, but what a prompt used most leaves only after all others, for ``hold`` tokens after it.

    Held are as many as half of the places: what comes to a place later needs room to stay a while.
    """

    def __init__(self, slots: int, top_k: int, hold: int) -> None:
        super().__init__(slots)
        self._uses, self._left, self._held = top_k * hold, 0, frozenset()
        self._prompt = False

    @property
    def experts(self) -> list[int]:
        """Those that have a place, those that are not held first, each oldest first."""
        return sorted(self._order, key=self._held.__contains__)  # stable

    def use(self, experts: Sequence[int], pin: bool = True) -> list[int]:
        """See LayerPolicy; a prompt does not pin."""
        if not pin:
            self._left, self._prompt = self._uses, True
        return super().use(experts, pin)

    def touch(self, experts: Iterable[int]) -> None:
        """See LayerPolicy."""
        experts = list(experts)
        super().touch(experts)
        if self._prompt:  # its own, the most used last
            self._held = frozenset([e for e in experts if e in self._order][-(self.slots // 2) :])
            self._prompt = False
        else:
            self._left -= len(experts)
            self._held = self._held if self._left > 0 else frozenset()


class Pool:
    """Places that all layers share: the least recently used expert of any layer goes first."""

    def __init__(self, slots: int) -> None:
        """slots: of all layers together."""
        self.slots, self.order = slots, OrderedDict[tuple[int, int], None]()
        self.layers: list[PooledLayer] = []

    def join(self, slots: int, experts: int) -> PooledLayer:
        """The next layer. slots: its share, by which read-ahead and prompts go."""
        self.layers.append(PooledLayer(self, len(self.layers), slots, experts))
        return self.layers[-1]

    def fixed(self) -> int:
        """How many places hold what may not leave now."""
        return sum(layer.fixed() for layer in self.layers)

    def victim(self, beside: int | None = None) -> tuple[int, int] | None:
        """(layer, expert) that leaves next. beside: a layer that loses none."""
        return next((key for key in self.order if key[0] != beside and self.layers[key[0]].may_leave(key[1])), None)


class PooledLayer(LayerPolicy):
    """One layer's part of a pool. ``on_leave(expert)`` is told of experts that leave for another layer's."""

    def __init__(self, pool: Pool, layer: int, slots: int, experts: int) -> None:
        super().__init__(experts)
        self.slots, self._pool, self._layer = slots, pool, layer
        self.on_leave = lambda expert: None

    def fixed(self) -> int:
        """How many of its experts may not leave."""
        return len(self._hidden) + sum(e in self._order and e not in self._hidden for e in self._pinned)

    def may_leave(self, expert: int) -> bool:
        """Whether it is neither needed nor being read."""
        return expert not in self._pinned and expert not in self._hidden

    def room(self) -> int:
        """See LayerPolicy."""
        return self._pool.slots - self._pool.fixed()

    def admit(
        self, experts: Sequence[int], victims: Iterable[int] | None = None, stay: Collection[int] = ()
    ) -> list[Admission]:
        """See LayerPolicy. Where this layer's victims do not suffice, those of the pool follow."""
        own = None if victims is None else iter(victims)
        out = []
        for expert in experts:
            if len(self._pool.order) >= self._pool.slots and not self._make_room(own):
                break
            out += super().admit([expert], stay=stay)
            self._pool.order[self._layer, expert] = None
            self._pool.order.move_to_end((self._layer, expert), last=False)
        return out

    def touch(self, experts: Iterable[int]) -> None:
        """See LayerPolicy."""
        experts = [expert for expert in experts if expert in self._order]
        super().touch(experts)
        for expert in experts:
            self._pool.order.move_to_end((self._layer, expert))

    def release(self) -> None:
        """See LayerPolicy. Layers that were computed before need nothing any more either."""
        for layer in self._pool.layers:
            layer._pinned.clear()

    def forget(self, expert: int) -> None:
        """See LayerPolicy."""
        super().forget(expert)
        del self._pool.order[self._layer, expert]

    def keep(self, experts: Iterable[int]) -> None:
        """See LayerPolicy."""
        super().keep(experts)
        for key in [key for key in self._pool.order if key[0] == self._layer and key[1] not in self._order]:
            del self._pool.order[key]

    def leave(self, expert: int) -> None:
        """Its place is another's now."""
        self._evict(expert)
        del self._pool.order[self._layer, expert]
        self.on_leave(expert)

    def _make_room(self, own: Iterator[int] | None) -> bool:
        """own: of a prompt, whose other experts here are in use."""
        mine = None if own is None else next((e for e in own if e in self._order and e not in self._hidden), None)
        key = self._pool.victim(None if own is None else self._layer) if mine is None else (self._layer, mine)
        if key is not None:
            self._pool.layers[key[0]].leave(key[1])
        return key is not None
