"""The pager: which experts stand in the arena, and the reads that bring others there.

Ties index, policy, reader and arena together. Only one thread at a time may use it (any thread may).

Invariants, kept here:

* A layer's row of slot words is owned here, in NumPy, and enters a graph as a fresh array. A word stands in the row
  only while its slot holds that expert's whole record: it leaves before the slot is written, and comes after the read.
* MLX cannot order a write of bytes against a pending read. So graphs that read slots are recorded (``reads``), and a
  slot is written only after all of those that read it have been evaluated (asserted in ``_start``).
* What a window uses stays until its commit, unless the window needs more than there is room for.
* What stands where, and who is evicted, follows from the tokens, whatever the disk does: a record that was read ahead
  serves a miss of the same pass, and stands in the row from the layer's next pass on (awaited there). What is given
  up leaves no trace, also if it was read already.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from custom_kernels.dequant_gemv import Arena
from custom_kernels.slots import NO_SLOT
from mlx_moe.paging.arena import SlotArena, arena_pages
from mlx_moe.paging.index import ExpertIndex
from mlx_moe.paging.policy import Admission, Counters
from mlx_moe.paging.queue import Cancelled
from mlx_moe.paging.reader import ExpertReader, Fill
from mlx_moe.paging.residency import Layer, Load, Readers, Room
from mlx_moe.paging.statistics import ExpertStats
from mlx_moe.paging.usage import LayerUsage

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 5.0


class Pager:
    """Residency of experts: what is where, what is being read, what may be overwritten."""

    def __init__(
        self,
        index: ExpertIndex,
        slots: int,
        room: Room,
        reader: ExpertReader,
        usage: Sequence[LayerUsage] | None = None,
        by_worth: bool = False,
    ) -> None:
        """Allocate ``slots`` per layer (at most as many as it has experts), all empty.

        usage: of each layer, learns what accepted tokens use. by_worth: who is worth least to it leaves first.

        Raises ValueError when they do not fit into memory, OSError when a file of the index is not there.
        """
        self._index, self._room, self._reader = index, room, reader
        self._number = 0  # of the pass
        self._window = (0, 0)  # B, T of the pass
        self._bytes_read = self._ahead_failed = 0
        self._usage, self._by_worth = usage or [None] * len(index.layers), by_worth
        self._waits = reader.waits
        reader.files.note(index.files)
        self._allocate(slots, [None] * len(index.layers))

    @property
    def arena(self) -> Arena:
        """The chunks as kernels take them."""
        return self._slots.arena

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self._slots.nbytes

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

    def row(self, layer: int) -> mx.array:
        """Slot words [E] of a layer, uint32, for the graphs of this moment."""
        self._settle(layer)
        return mx.array(self._layers[layer].row)

    def words(self, layer: int, ids: np.ndarray, only: Iterable[int]) -> np.ndarray:
        """Slot words of the ids [...] that are among ``only``, uint32; NO_SLOT for others."""
        entry, chosen = self._layers[layer], list(only)
        row = np.full_like(entry.row, NO_SLOT)
        row[chosen] = entry.row[chosen]
        return row[ids]

    def present(self, layer: int) -> list[int]:
        """Experts that have a place, the oldest first."""
        return self._layers[layer].policy.experts

    def present_experts(self) -> list[list[int]]:
        """``present`` of every layer."""
        return [entry.policy.experts for entry in self._layers]

    def leaving(self, layer: int) -> list[int]:
        """Experts that have a place, in the order in which they would leave."""
        return self._layers[layer].policy.leaving

    # A pass

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
                self._learn(entry, ids)
                entry.used.clear()
            if entry.prompted:
                self._learn(entry, self._kept(entry.prompted, accepted))
                entry.prompted.clear()
            entry.policy.release()

    def abort(self) -> None:
        """The pass was interrupted: reads are drained, and it leaves no trace in the order of use."""
        self._reader.queue.stop()
        for layer, entry in enumerate(self._layers):
            for expert in list(entry.loads):
                self._end(layer, expert, keep=False)
            entry.reset()
        self._window = (0, 0)

    def use(self, layer: int, ids: np.ndarray) -> tuple[list[int], list[int]]:
        """A window's tokens use the experts ``ids`` [n, k] of a layer, which ``row`` routed.

        Returns:
            Those that stand in memory and those that do not, each once, in order of first use. The first are pinned,
            and the second will be.
        """
        entry = self._layers[layer]
        self._forget_readers(layer)
        with self._waits.on_device():  # hardly, since ids come after them
            mx.eval([r.graphs for r in entry.readers if r.number < self._number])
        entry.readers = [r for r in entry.readers if r.number == self._number]
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
        self._forget_readers(layer)
        self._settle(layer)
        for expert in [e for e in entry.loads if e not in wanted]:
            self._reader.queue.cancel(entry.loads[expert].job)
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

        The caller must ``arrive`` with each, queue what uses it and hand that to ``reads`` before the next.
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
                self._reader.queue.promote(entry.loads[expert].job)
        absent = [e for e in experts if entry.row[e] == NO_SLOT and e not in entry.loads]
        admitted = entry.policy.admit(absent, victims)
        self._start(layer, admitted, ahead=False)
        if len(admitted) < len(absent):
            raise RuntimeError(f"layer {layer}: no room for {len(absent)} experts in {entry.policy.slots} slots")

    def arrive(self, layer: int, experts: Iterable[int]) -> None:
        """Wait until these stand in memory. Raises OSError, naming file and expert, when one cannot be read."""
        errors = [self._arrive(layer, expert) for expert in experts]
        for error in filter(None, errors):
            raise error

    def ahead(self, layer: int, experts: Iterable[int], most: int) -> None:
        """Read, when nothing else is to be read, what a layer will probably need; at most ``most`` at a time."""
        self._settle(layer)
        self._start(layer, self._layers[layer].policy.ahead(list(dict.fromkeys(experts)), most), ahead=True)

    def reads(self, layer: int, graphs: Iterable[mx.array], experts: Iterable[int]) -> Readers:
        """Graphs that read these experts' slots are queued. Nothing may be fetched before they are handed over.

        Returns what holds them until they have been evaluated; see Readers.
        """
        entry, places = self._layers[layer], frozenset()
        if entry.absent:
            places = frozenset(entry.policy.place(expert) for expert in experts)
        readers = Readers(list(graphs), places, self._number)
        if places:
            entry.readers.append(readers)
        return readers

    # As a whole

    def fill(self, wanted: Sequence[Sequence[int]] | None = None) -> None:
        """Read experts into free places before anything else; the log says how far it is.

        wanted: for each layer, the newest last; by default all of layers that have a slot for every expert.

        Raises OSError, naming file and expert, when one cannot be read; what was read before stays.
        """
        if wanted is None:
            wanted = [range(e.row.size) if e.policy.slots == e.row.size else () for e in self._layers]
        todo = [(i, a) for i, row in enumerate(wanted) for a in self._layers[i].policy.admit(row)]
        fills = (Fill(i, a.expert, self._view(i, a)) for i, a in todo)
        total, done, said = sum(self._layers[i].record_bytes for i, _ in todo), 0, time.monotonic()
        try:
            for (i, admission), nbytes in zip(todo, self._reader.fill(fills), strict=True):
                self._layers[i].show(admission.expert)
                done, self._bytes_read = done + nbytes, self._bytes_read + nbytes
                if time.monotonic() - said > REPORT_EVERY_S:
                    said = time.monotonic()
                    logger.info("experts: %.1f of %.1f GB read", done / 1e9, total / 1e9)
        except BaseException:
            self.abort()
            raise
        for entry, row in zip(self._layers, wanted, strict=True):
            entry.policy.touch(row)
        if not any(entry.absent for entry in self._layers):
            self._reader.close()

    def resize(self, slots: int) -> None:
        """Another number of slots per layer, between passes; what would leave last is read again, as much as fits.

        The old arena goes before the new one is made, so that never both take memory. Raises ValueError, before
        anything is changed, when the new one does not fit; OSError as ``fill``.
        """
        arena_pages(self._records(slots), *self._room)
        self.abort()
        mx.eval([readers.graphs for entry in self._layers for readers in entry.readers])
        kept, counters = [e.policy.leaving for e in self._layers], [e.policy.counters for e in self._layers]
        self._layers, self._slots = [], None
        mx.clear_cache()
        self._allocate(slots, counters)
        wanted = []
        for entry, experts in zip(self._layers, kept, strict=True):
            others = sorted(set(range(entry.row.size)) - set(experts)) if entry.policy.slots == entry.row.size else []
            wanted.append([*others, *experts[-entry.policy.slots :]])
        self.fill(wanted)

    def close(self) -> None:
        """Drain reads, end the threads, close the files, and give the memory back; no pass may follow."""
        self.abort()
        self._reader.close()
        self._layers, self._slots = [], None

    def statistics(self) -> ExpertStats:
        """Counters since the model was loaded."""
        counters = [entry.policy.counters for entry in self._layers]
        return ExpertStats(
            slots=max((entry.policy.slots for entry in self._layers), default=0),
            layer_hits=tuple(c.hits for c in counters),
            layer_misses=tuple(c.misses for c in counters),
            evictions=sum(c.evictions for c in counters),
            ahead_useful=sum(c.ahead_useful for c in counters),
            ahead_wasted=sum(c.ahead_wasted for c in counters),
            ahead_failed=self._ahead_failed,
            bytes_read=self._bytes_read,
            demanded_wait_ms=self._waits.disk_s * 1e3,
            device_wait_ms=self._waits.device_s * 1e3,
        )

    def _kept(self, ids: Sequence[np.ndarray], accepted: int) -> np.ndarray:
        """Of a pass's ids [B * T, k], in parts, those of the first ``accepted`` tokens, [B * accepted, k]."""
        whole = np.concatenate(ids)
        k = whole.shape[-1]
        return whole.reshape(*self._window, k)[:, :accepted].reshape(-1, k)

    def _learn(self, entry: Layer, ids: np.ndarray) -> None:
        if entry.usage is not None:
            entry.usage.add(ids)

    def _records(self, slots: int) -> list[tuple[int, int]]:
        return [(layer.record_bytes, min(slots, layer.experts)) for layer in self._index.layers]

    def _allocate(self, slots: int, counters: Sequence[Counters | None]) -> None:
        records = self._records(slots)
        self._slots = SlotArena(records, *self._room)
        self._layers = [
            Layer(
                layer.experts, nbytes, [self._slots.allocate(nbytes) for _ in range(count)], old, usage, self._by_worth
            )
            for layer, (nbytes, count), old, usage in zip(
                self._index.layers, records, counters, self._usage, strict=True
            )
        ]

    def _view(self, layer: int, admission: Admission) -> np.ndarray:
        entry = self._layers[layer]
        return self._slots.view(entry.words[admission.place], entry.record_bytes)

    def _start(self, layer: int, admitted: Sequence[Admission], ahead: bool) -> None:
        """Take the rows of who was evicted, wait for graphs that read these places, and start the reads."""
        entry, places = self._layers[layer], {admission.place for admission in admitted}
        for admission in admitted:
            if admission.evicted is not None:
                entry.hide(admission.evicted)
        with self._waits.on_device():
            mx.eval([r.graphs for r in entry.readers if r.places & places])
        entry.readers = [r for r in entry.readers if not r.places & places]
        for admission in admitted:
            assert entry.row[admission.expert] == NO_SLOT and admission.expert not in entry.loads
            assert not any(admission.place in r.places for r in entry.readers), "a pending graph reads this place"
            job = self._reader.start(Fill(layer, admission.expert, self._view(layer, admission)), demanded=not ahead)
            entry.loads[admission.expert] = Load(job, self._number, ahead)

    def _forget_readers(self, layer: int) -> None:
        """Ids of this layer are there, so all that the layer before it queued in this pass has been evaluated."""
        if layer:
            before = self._layers[layer - 1]
            before.readers = [r for r in before.readers if r.number != self._number]

    def _settle(self, layer: int) -> None:
        """What an earlier pass read ahead stands in the row from now on; what could not be read is gone."""
        for expert, load in list(self._layers[layer].loads.items()):
            if load.number < self._number:
                self._end(layer, expert)

    def _arrive(self, layer: int, expert: int) -> OSError | None:
        """Wait for an expert. One that failed when it was read ahead gets another try, since now it is needed."""
        load = self._layers[layer].loads.get(expert)
        error = None if load is None else self._end(layer, expert)
        if error is None or not load.ahead:
            return error
        self.fetch(layer, [expert])
        return self._end(layer, expert)

    def _end(self, layer: int, expert: int, keep: bool = True) -> OSError | None:
        """Wait for a read: the expert stands in the row, or its place is free again and the error is returned."""
        entry = self._layers[layer]
        load, error, done = entry.loads[expert], None, False
        try:
            with self._waits.on_disk():
                load.job.wait()
            done = True
        except Cancelled:
            pass
        except OSError as failed:
            error = failed
        del entry.loads[expert]  # first, so that after an interrupt below nobody ends it again
        if done and keep:
            entry.show(expert)
            self._bytes_read += entry.record_bytes
        else:
            entry.policy.forget(expert)
            self._ahead_failed += load.ahead and error is not None
        return error
