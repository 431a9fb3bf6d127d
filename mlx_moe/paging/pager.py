"""The pager: which experts stand in the arena, and the reads that bring others there.

Ties index, policy, reader and arena together. Only one thread at a time may use it (any thread may).

Invariants, kept here:

* A layer's row of slot words is owned here, in NumPy, and enters a graph as a fresh array. A word stands in the row
  only while its slot holds that expert's whole record: it leaves before the slot is written, and comes after the read.
* MLX cannot order a write of bytes against a pending read. So graphs that read slots are recorded (``reads``), and a
  slot is written only after all of those that read it have been evaluated (asserted in ``_start``).
* What a window uses stays until its commit, unless the window needs more than there is room for.
* What stands where, and who is evicted, follows from the tokens, whatever the disk does (``flow.py``); what was read
  ahead is awaited where it becomes visible.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from custom_kernels.dequant_gemv import Arena
from custom_kernels.slots import NO_SLOT
from mlx_moe.paging.arena import SlotArena, arena_pages
from mlx_moe.paging.flow import Flow
from mlx_moe.paging.index import ExpertIndex
from mlx_moe.paging.policy import Admission, Counters
from mlx_moe.paging.queue import Cancelled
from mlx_moe.paging.reader import ExpertReader, Fill
from mlx_moe.paging.residency import Layer, Load, Readers, Room
from mlx_moe.paging.statistics import ExpertStats
from mlx_moe.paging.usage import LayerUsage

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 5.0


class Pager(Flow):
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
        super().__init__()
        self._index, self._room, self._reader = index, room, reader
        self._bytes_read = self._ahead_failed = 0
        self._aborting = False  # an abort began; if it was interrupted, the next call ends it
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

    def row(self, layer: int) -> mx.array:
        """Slot words [E] of a layer, uint32, for the graphs of this moment."""
        self.settle(layer, early=True)
        return mx.array(self._layers[layer].row)

    def words(self, layer: int, ids: np.ndarray, only: Iterable[int]) -> np.ndarray:
        """Slot words of the ids [...] that are among ``only``, uint32; NO_SLOT for others."""
        entry, chosen = self._layers[layer], list(only)
        row = np.full_like(entry.row, NO_SLOT)
        row[chosen] = entry.row[chosen]
        return row[ids]

    # A pass

    def abort(self) -> None:
        """The pass was interrupted: reads are drained, and it leaves no trace in the order of use."""
        self._aborting = True
        self._reader.queue.stop()
        for layer, entry in enumerate(self._layers):
            for expert in list(entry.loads):
                self._end(layer, expert, keep=False)
            entry.reset()
        self._window = (0, 0)
        self._aborting = False

    def commit(self, accepted: int) -> None:
        """See Flow."""
        if self._aborting:
            self.abort()
        super().commit(accepted)

    def use(self, layer: int, ids: np.ndarray) -> tuple[list[int], list[int]]:
        """See Flow; graphs of earlier passes have read what they read."""
        self._forget_readers(layer)
        self._end_readers(layer)
        return super().use(layer, ids)

    def use_all(self, layer: int, experts: Sequence[int]) -> None:
        """See Flow; graphs of earlier passes have read what they read."""
        self._forget_readers(layer)
        self._end_readers(layer)
        super().use_all(layer, experts)

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
        anything is changed, when the new one does not fit; OSError as ``fill``. Where it cannot be made, there is one
        of the old size again, with nothing in it.
        """
        arena_pages(self._records(slots), *self._room)
        self.keep_pass()
        self.abort()
        mx.eval([readers.graphs for entry in self._layers for readers in entry.readers])
        mx.synchronize()  # graphs of layers that are all in memory are not among these
        kept, counters = [e.policy.leaving for e in self._layers], [e.policy.counters for e in self._layers]
        before = max(entry.policy.slots for entry in self._layers)
        self._layers, self._slots = [], None
        mx.clear_cache()
        try:
            self._allocate(slots, counters)
        except BaseException:
            self._allocate(before, counters)
            raise
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
        together = None if ahead else self._reader.queue.together()
        for admission in admitted:
            assert entry.row[admission.expert] == NO_SLOT and admission.expert not in entry.loads
            assert not any(admission.place in r.places for r in entry.readers), "a pending graph reads this place"
            fill = Fill(layer, admission.expert, self._view(layer, admission))
            job = self._reader.start(fill, not ahead, len(admitted), together)
            entry.loads[admission.expert] = Load(job, self._number, ahead)
        if together is not None:
            self._reader.queue.go(together)

    def _end_readers(self, layer: int) -> None:
        """Graphs of earlier passes are evaluated, and hold nothing any more."""
        entry = self._layers[layer]
        with self._waits.on_device():  # hardly, since ids come after them
            mx.eval([r.graphs for r in entry.readers if r.number < self._number])
        entry.readers = [r for r in entry.readers if r.number == self._number]

    def _forget_readers(self, layer: int) -> None:
        """Ids of this layer are there, so all that the layer before it queued in this pass has been evaluated."""
        if layer:
            before = self._layers[layer - 1]
            before.readers = [r for r in before.readers if r.number != self._number]

    def _promote(self, load: Load) -> None:
        self._reader.queue.promote(load.job)

    def _cancel(self, load: Load) -> None:
        self._reader.queue.cancel(load.job)

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
