"""How experts come to places and leave them while passes go by: the rules, without memory, device or disk.

The pager adds what moves bytes; a replay of recorded routing (``replay.py``) adds nothing, so that both follow the same
rules to the letter. What stands where, and who is evicted, follows from the tokens: a record that was read ahead serves
a miss of the same pass, and stands in the row from the layer's next pass on; one that was read early enough (``early``)
stands there when its layer's turn comes. What is given up leaves no trace, also if it was read already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from custom_kernels.slots import NO_SLOT
from mlx_moe.paging.policy import Admission
from mlx_moe.paging.residency import Layer, Load


class Flow:
    """Residency of experts by layer. Subclasses say what starting and ending a read is (``_start``, ``_end``)."""

    def __init__(self) -> None:
        self._layers: list[Layer] = []
        self._number = 0  # of the pass
        self._window = (0, 0)  # B, T of the pass

    @property
    def streams(self) -> bool:
        """Whether some layer has more experts than slots."""
        return any(entry.policy.slots < entry.row.size for entry in self._layers)

    def slots(self, layer: int) -> int:
        """How many experts of a layer can stand in memory."""
        return self._layers[layer].policy.slots

    def complete(self, layer: int) -> bool:
        """Whether all experts of a layer stand in memory, so that nothing of it is ever read or overwritten."""
        return not self._layers[layer].absent

    def present(self, layer: int) -> list[int]:
        """Experts that have a place, the oldest first."""
        return self._layers[layer].policy.experts

    def present_experts(self) -> list[list[int]]:
        """``present`` of every layer."""
        return [entry.policy.experts for entry in self._layers]

    def leaving(self, layer: int) -> list[int]:
        """Experts that have a place, in the order in which they would leave."""
        return self._layers[layer].policy.leaving

    def begin(self, batch: int, tokens: int) -> None:
        """A pass over [batch, tokens] starts; an earlier one that was not committed is kept whole."""
        self.keep_pass()
        self._number += 1
        self._window = batch, tokens

    def keep_pass(self) -> None:
        """The last pass is kept whole, unless it was committed already."""
        self.commit(self._window[1])

    def commit(self, accepted: int) -> None:
        """Of the last pass the first ``accepted`` tokens are kept: what they used is the newest, in token order."""
        for entry in self._layers:
            if entry.used:
                ids = self._kept(entry.used, accepted)
                entry.policy.touch(ids.reshape(-1).tolist())
                entry.learn(ids)
                entry.used.clear()
            if entry.prompted:
                entry.learn(self._kept(entry.prompted, accepted))
                entry.prompted.clear()
            entry.policy.release()

    def use(self, layer: int, ids: np.ndarray) -> tuple[list[int], list[int]]:
        """A window's tokens use the experts ``ids`` [n, k] of a layer, which its row routed.

        Returns:
            Those that stand in memory and those that do not, each once, in order of first use. The first are pinned,
            and the second will be.
        """
        entry = self._layers[layer]
        entry.used.append(ids)
        needed = list(dict.fromkeys(ids.reshape(-1).tolist()))
        missing = entry.policy.use(needed)
        absent = set(missing)
        return [e for e in needed if e not in absent], missing

    def use_all(self, layer: int, experts: Sequence[int]) -> None:
        """A prompt uses these experts; none is pinned. What is being read and is not among them is given up.

        ``prompted`` says which token uses which.
        """
        entry, wanted = self._layers[layer], set(experts)
        self.settle(layer)
        for expert in [e for e in entry.loads if e not in wanted]:
            self._cancel(entry.loads[expert])
            self._end(layer, expert, keep=False)  # even if it was done, or the disk would decide
        entry.policy.use(experts, pin=False)

    def prompted(self, layer: int, ids: np.ndarray) -> None:
        """A prompt's tokens use the experts ``ids`` [n, k] of a layer; that is learned when the prompt is kept."""
        entry = self._layers[layer]
        if entry.usage is not None and entry.absent:
            entry.prompted.append(ids)

    def touch(self, layer: int, experts: Iterable[int]) -> None:
        """These are the newest now, in this order."""
        self._layers[layer].policy.touch(experts)

    def waves(self, layer: int, missing: Sequence[int]) -> Iterator[Sequence[int]]:
        """What is missing, as many at a time as there is room for; the reads of a wave have been started.

        The caller must ``arrive`` with each, and have queued what uses it, before the next.
        """
        policy, loads, start = self._layers[layer].policy, self._layers[layer].loads, 0
        while start < len(missing):
            room, stop = policy.room(), start
            while stop < len(missing) and (room or missing[stop] in loads):
                room -= missing[stop] not in loads
                stop += 1
            if stop == start:
                policy.release()  # what earlier waves used is queued, and recorded as being read
                continue
            self.fetch(layer, missing[start:stop])
            yield missing[start:stop]
            start = stop

    def fetch(self, layer: int, experts: Sequence[int], victims: Iterable[int] | None = None) -> None:
        """Start to read what of ``experts`` is neither in memory nor being read; there must be room.

        victims: see LayerPolicy.admit.
        """
        entry = self._layers[layer]
        for expert in experts:
            if expert in entry.loads:
                self._promote(entry.loads[expert])
        absent = [e for e in experts if entry.row[e] == NO_SLOT and e not in entry.loads]
        admitted = entry.policy.admit(absent, victims)
        self._start(layer, admitted, ahead=False)
        if len(admitted) < len(absent):
            raise RuntimeError(f"layer {layer}: no room for {len(absent)} experts in {entry.policy.slots} slots")

    def arrive(self, layer: int, experts: Iterable[int]) -> None:
        """These stand in memory from now on. Raises OSError, naming file and expert, when one cannot be read."""
        errors = [self._arrive(layer, expert) for expert in experts]
        for error in filter(None, errors):
            raise error

    def ahead(self, layer: int, experts: Iterable[int], most: int) -> None:
        """Read, when nothing else is to be read, what a layer will probably need; at most ``most`` at a time."""
        self.settle(layer)
        self._start(layer, self._layers[layer].policy.ahead(list(dict.fromkeys(experts)), most), ahead=True)

    def early(self, layer: int, experts: Sequence[int], most: int) -> None:
        """As ``ahead``, before the pass comes to the layer, in whose row they then stand; none of them leaves for
        another of them.
        """
        self.settle(layer)
        entry = self._layers[layer]
        admitted = entry.policy.ahead(experts, most, stay=experts)
        self._start(layer, admitted, ahead=True)
        for admission in admitted:
            entry.loads[admission.expert] = entry.loads[admission.expert]._replace(early=True)

    def settle(self, layer: int, early: bool = False) -> None:
        """What an earlier pass read ahead stands in the row from now on; what could not be read is gone.

        early: what ``early`` read in this pass, too.
        """
        for expert, load in list(self._layers[layer].loads.items()):
            if load.number < self._number or (early and load.early):
                self._end(layer, expert)

    def _kept(self, ids: Sequence[np.ndarray], accepted: int) -> np.ndarray:
        """Of a pass's ids [B * T, k], in parts, those of the first ``accepted`` tokens, [B * accepted, k]."""
        whole = np.concatenate(ids)
        k = whole.shape[-1]
        return whole.reshape(*self._window, k)[:, :accepted].reshape(-1, k)

    def _arrive(self, layer: int, expert: int) -> OSError | None:
        """An expert stands in memory, or the error is returned. One that failed ahead gets another try, now needed."""
        load = self._layers[layer].loads.get(expert)
        error = None if load is None else self._end(layer, expert)
        if error is None or not load.ahead:
            return error
        self.fetch(layer, [expert])
        return self._end(layer, expert)

    # What a subclass does beside the rules

    def _start(self, layer: int, admitted: Sequence[Admission], ahead: bool) -> None:
        """Take the rows of who was evicted, and start to read the others into their places."""
        raise NotImplementedError

    def _end(self, layer: int, expert: int, keep: bool = True) -> OSError | None:
        """Wait for a read: the expert stands in the row, or its place is free again and the error is returned."""
        raise NotImplementedError

    def _promote(self, load: Load) -> None:
        """What was read ahead is demanded now."""

    def _cancel(self, load: Load) -> None:
        """What is being read is not wanted any more."""
