"""Experts in the arena: the expert source of models whose experts lie in files as packed blocks.

There is one path, whether all experts are in memory or few: what computes is here, what is where and what must be
waited for is the pager's. A layer whose experts are all in memory waits for nothing in a window.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from custom_kernels.dequant_gemv import expert_combine, expert_dequantize, expert_down, expert_gate_up
from custom_kernels.moce_route import plain_route
from custom_kernels.slots import NO_SLOT
from mlx_moe.config import ModelConfig
from mlx_moe.models.layers import WINDOW, Linear, gather_mm
from mlx_moe.paging.index import ExpertIndex
from mlx_moe.paging.learning import Keeper, Learning
from mlx_moe.paging.matrices import Matrices
from mlx_moe.paging.moce import MoceConfig
from mlx_moe.paging.pager import Pager
from mlx_moe.paging.prompt import AHEAD_SHARE, WINDOW_AHEAD_SHARE, PromptReads
from mlx_moe.paging.reader import ExpertReader
from mlx_moe.paging.recorder import RoutingRecorder, fingerprint
from mlx_moe.paging.residency import Limits, Readers, Room
from mlx_moe.paging.routing import WindowRouter
from mlx_moe.paging.statistics import ExpertStats
from mlx_moe.paging.token_reads import NO_REPLAY, TokenReads
from mlx_moe.paging.trace import KEPT, Residency, TraceHeader, TraceWriter

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 256 << 20
"""Unpacked matrices of the experts that a prompt runs through at once."""
TOKENS_AT_ONCE = 512
"""Of a prompt, when its experts' outputs are added up in float32."""


class Group(NamedTuple):
    """Rows of a prompt, sorted by expert, and all of their experts, ascending."""

    start: int
    stop: int
    experts: np.ndarray


class ArenaExperts:
    """An expert source (models.qwen4_exp.sources.ExpertSource) whose experts stand in the arena, still packed.

    Mixing weights stay float32, whatever the model computes in.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: ExpertIndex,
        slots: int,
        room: Room,
        reader: ExpertReader | None = None,
        read_ahead: bool = True,
        limits: Limits | None = None,
        moce: MoceConfig | None = None,
        learning: Learning | None = None,
    ) -> None:
        """Allocate memory for ``slots`` experts of each layer; ``fill`` reads the first of them.

        Args:
            index: of every MoE layer, the draft layer's last.
            slots: at least ``num_experts_per_tok``, unless layers have fewer experts.
            room: memory that the arena may take.
            reader: of the index; one with default settings if not given.
            read_ahead: read what the next layer will probably need while this one computes.
            limits: of MLX's memory, which the arena's size moves.
            moce: prefer experts in memory in windows, in layers that have more experts than slots.
            learning: what to start with and what to remember; nothing if not given.

        Raises ValueError when they do not fit into memory, or a setting of moce does not suit the model.
        """
        self._top_k, self._normalize = config.num_experts_per_tok, config.norm_topk_prob
        self._trunk, self._read_ahead = config.num_hidden_layers, read_ahead
        self._index, self._layers = index, [Matrices.of(layer) for layer in index.layers]
        self._routers: list[Linear] = []
        self._windows = WindowRouter(config, [layer.experts for layer in index.layers], moce)
        self.reader = reader or ExpertReader(index)
        usage = None if learning is None else learning.layers(self._top_k)
        self._pager = Pager(index, slots, room, self.reader, usage, learning is not None and learning.by_worth)
        self._closed, self._limits, self._recorder = False, limits, None
        self._seed, self._keeper, self._start, self._eviction = None, None, {}, {}
        self._by_token: TokenReads | None = None
        if learning is not None:
            if learning.by_worth:
                counts = None if learning.seed.kind == "empty" else tuple(map(tuple, learning.seed.counts.tolist()))
                self._eviction = {"eviction": "frequency", "start_counts": counts}
            self._seed, self._keeper = learning.seed, Keeper(learning, usage, self._pager.present_experts)
            self._start = {"seed": learning.seed.kind, "seed_hash": learning.digest}
            if learning.tokens is not None:
                self._by_token = TokenReads(learning.tokens, self._pager, self._top_k)
            weakref.finalize(self, self._keeper.save)  # at the end of the process too
        if limits is not None:
            limits.hold(self._pager.nbytes)
            weakref.finalize(self, limits.release)

    @property
    def kernels(self) -> frozenset[tuple[str, str]]:
        """See ExpertSource."""
        found = {("moce_route", ""), ("expert_combine", "")}
        for gate, up, down in self._layers:
            found |= {("expert_gate_up", f"{gate.format.name}+{up.format.name}"), ("expert_down", down.format.name)}
            found |= {("expert_dequantize", matrix.format.name) for matrix in (gate, up, down)}
        return frozenset(found)

    @property
    def streams(self) -> bool:
        """Whether some layer has more experts than slots."""
        return self._pager.streams

    @property
    def records(self) -> list[tuple[int, int]]:
        """Of every layer, the draft layer's last: how many experts it has, and the bytes of one's record."""
        return [(layer.experts, layer.record_bytes) for layer in self._index.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self._pager.nbytes

    def fill(self) -> None:
        """Read what to start with, before anything else; the log says how far it is.

        That is all experts of layers that have room for them, and of the others what the seed ranks highest.

        Raises OSError, naming file and expert, when one cannot be read.
        """
        if self._seed is None or self._seed.kind == "empty":
            self._pager.fill()
            return
        logger.info("experts to start with: by %(seed)s, %(seed_hash)s", self._start)
        layers = range(len(self._layers))
        self._pager.fill([self._seed.ranking(layer, self._pager.slots(layer)) for layer in layers])

    def statistics(self) -> ExpertStats:
        """See ExpertSource."""
        return replace(self._pager.statistics(), **self._windows.counters(), **self._start)

    def resize(self, slots: int) -> None:
        """See ExpertSource."""
        if slots < self._top_k:
            raise ValueError(f"{slots} slots per layer; allowed: at least {self._top_k}, as a token uses")
        self._refuse_closed()
        if self._recorder is not None:
            self._recorder.moved()
        self._pager.resize(slots)
        if self._limits is not None:
            self._limits.hold(self._pager.nbytes)

    def relieve(self) -> None:
        """See ExpertSource. A quarter of the slots goes, if the slots were not asked for by number."""
        if self._closed or self._limits is None or not self._limits.pressed():
            return
        slots = max(self._pager.slots(layer) for layer in range(len(self._layers)))
        fewer = max(self._top_k, slots * 3 // 4)
        if fewer < slots:
            logger.warning("memory is short: %d experts per layer stay in memory instead of %d", fewer, slots)
            self.resize(fewer)

    def close(self) -> None:
        """See ExpertSource."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as rest:  # done in any case, the last first
            if self._limits is not None:
                rest.callback(self._limits.release)
            rest.callback(self._pager.close)
            if self._recorder is not None:
                rest.callback(self._recorder.close)
            if self._keeper is not None:
                self._pager.keep_pass()
                if self._by_token is not None:
                    self._by_token.keep_pass()
                self._keeper.save()

    def bind(self, routers: Sequence[mx.array]) -> None:
        """See ExpertSource."""
        for weight in routers:
            self._routers.append(Linear(weight.shape[1], weight.shape[0]))
            self._routers[-1].weight = weight

    def record(self, file: str | Path, routers: Sequence[mx.array], dtype: mx.Dtype) -> None:
        """See ExpertSource."""
        if self._by_token is not None:  # a recording holds routers' logits alone
            raise ValueError(NO_REPLAY)
        layers, pager = self._index.layers, self._pager  # and not self, which would never be forgotten
        header = TraceHeader(
            fingerprint=fingerprint(routers),
            experts=tuple(layer.experts for layer in layers),
            top_k=self._top_k,
            normalize=self._normalize,
            trunk=self._trunk,
            record_bytes=tuple(layer.record_bytes for layer in layers),
            group_sizes=tuple(self._group_size(i, dtype) for i in range(len(layers))),
            kept=max(self._top_k, KEPT),
            window=WINDOW,
            read_ahead=self._read_ahead,
            moce=self._windows.moce,
            **self._eviction,
        )

        def residency() -> Residency:
            return Residency(tuple((pager.slots(i), tuple(pager.present(i))) for i in range(len(layers))))

        self._recorder = RoutingRecorder(TraceWriter(file, header), header, residency)
        weakref.finalize(self, self._recorder.close)

    def begin(self, window_ids: mx.array) -> None:
        """See ExpertSource."""
        self._refuse_closed()
        if self._recorder is not None:
            self._recorder.begin(*window_ids.shape)
        self._pager.begin(*window_ids.shape)
        if self._by_token is not None:
            self._by_token.begin(window_ids)
        if self._keeper is not None:
            self._keeper.tick()

    def commit(self, accepted: int) -> None:
        """See ExpertSource."""
        if self._recorder is not None:
            self._recorder.commit(accepted)
        self._pager.commit(accepted)
        if self._by_token is not None:
            self._by_token.commit(accepted)

    def abort(self) -> None:
        """See ExpertSource."""
        if not self._closed:
            if self._recorder is not None:
                self._recorder.interrupted()
            if self._by_token is not None:
                self._by_token.abort()
            self._pager.abort()

    def moe(self, layer: int, x: mx.array, logits: mx.array, shared: mx.array, phase: str = "decode") -> mx.array:
        """See ExpertSource. Windows run fused, 8 tokens at a time; prompts by expert, which waits for the ids.

        Raises OSError, naming file and expert, when one cannot be read.
        """
        if self._recorder is not None:
            self._recorder.routed(layer, logits, phase == "prefill")
        if phase == "prefill":
            return self._prompt(layer, x, logits, shared)
        parts = [slice(i, i + WINDOW) for i in range(0, len(x), WINDOW)]
        return _joined([self._window(layer, x[part], logits[part], shared[part]) for part in parts])

    def run(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array, shared: mx.array) -> mx.array:
        """``moe`` for experts ids [T, k] with mixing weights [T, k] that the caller chose; waits for nothing.

        All experts of the layer must be in memory.
        """
        self._refuse_closed()
        partials = self._partials(layer, x, self._pager.row(layer)[ids])
        return expert_combine(partials, weights, shared, x.dtype)

    def unpacked(self, layer: int) -> tuple[mx.array, mx.array, mx.array]:
        """Gate, up and down [E, out, in] of a layer whose experts are all in memory, float32."""
        self._refuse_closed()
        words = self._pager.row(layer)
        gate, up, down = (expert_dequantize(words, self._pager.arena, m, mx.float32) for m in self._layers[layer])
        return gate, up, down

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the model was closed; load it again")

    # Windows

    def _window(self, layer: int, x: mx.array, logits: mx.array, shared: mx.array) -> mx.array:
        """Up to 8 tokens."""
        routing = self._windows.route(layer, logits, self._pager.row(layer))
        if self._pager.complete(layer):
            partials = self._partials(layer, x, routing.words)
            return expert_combine(partials, routing.weights, shared, x.dtype)
        self._windows.queue(layer, logits, routing)  # on its own, or ids would be ready only when the rest is
        soon = self._guess(layer + 1, x, self._windows.biased)
        partials = self._partials(layer, x, routing.words)
        mx.async_eval(shared, partials)
        ids = self.reader.waits.values(routing.ids)
        self._windows.count(layer, routing)
        if self._by_token is not None:
            self._by_token.used(layer, ids, window=True)
        partials = self._with_missing(layer, x, ids, partials, soon)
        y = expert_combine(partials, routing.weights, shared, x.dtype)
        mx.async_eval(y)  # the device has work while the next layer is built
        return y

    def _with_missing(
        self, layer: int, x: mx.array, ids: np.ndarray, partials: mx.array, soon: mx.array | None
    ) -> mx.array:
        """``partials`` [T, k, H] of experts in memory, and of the others once they are read.

        Places of ``partials`` are replaced, never added to, so bits do not depend on who was in memory.
        """
        pager = self._pager
        here, missing = pager.use(layer, ids)
        pager.reads(layer, [partials], here)
        if not missing:
            self._ahead(layer + 1, soon)
        for i, wave in enumerate(pager.waves(layer, missing)):
            if i == 0:
                self._ahead(layer + 1, soon)  # while this layer's reads run
            pager.arrive(layer, wave)
            words = pager.words(layer, ids, wave)
            part = self._partials(layer, x, mx.array(words))
            partials = mx.where(mx.array(words != NO_SLOT)[..., None], part, partials)
            pager.reads(layer, [part], wave)
            mx.async_eval(partials)
        return partials

    def _partials(self, layer: int, x: mx.array, words: mx.array) -> mx.array:
        """What each expert of ``words`` [T, k] adds, not yet weighted: [T, k, H] float32, zeros for NO_SLOT."""
        gate, up, down = self._layers[layer]
        h = expert_gate_up(x, words, self._pager.arena, gate, up)
        return expert_down(h, words, self._pager.arena, down)

    # Read-ahead

    def _guess(self, layer: int, x: mx.array, biased: bool = False) -> mx.array | None:
        """Ids [T, k] that a layer will probably need, by its router on the input of the one before; under way.

        biased: prefer experts in memory, as the layer will.
        """
        if not self._read_ahead or layer >= self._trunk or self._pager.complete(layer):
            return None
        logits = self._routers[layer](x[None])[0].astype(mx.float32)
        if self._recorder is not None:
            self._recorder.guessed(layer, logits)
        if biased:
            ids = self._windows.route(layer, logits, self._pager.row(layer)).ids
        else:
            ids = plain_route(logits, self._top_k, self._normalize)[0]
        mx.async_eval(ids)
        return ids

    def _ahead(self, layer: int, ids: mx.array | None) -> None:
        """Read what a window will probably need when nothing else is to be read."""
        if ids is not None:
            most = self._pager.slots(layer) // WINDOW_AHEAD_SHARE
            self._pager.ahead(layer, self.reader.waits.values(ids).reshape(-1).tolist(), most)

    # Prompts

    def _prompt(self, layer: int, x: mx.array, logits: mx.array, shared: mx.array) -> mx.array:
        """Many tokens: rows of one expert stand together, and experts are unpacked a group at a time."""
        ids, weights = plain_route(logits, self._top_k, self._normalize)
        mx.async_eval(ids)
        soon = self._guess(layer + 1, x)
        mx.async_eval(shared)  # on its own, or the ids would be ready only when this is
        chosen = self.reader.waits.values(ids).reshape(-1)
        self._pager.prompted(layer, chosen.reshape(-1, self._top_k))
        if self._by_token is not None:
            self._by_token.used(layer, chosen.reshape(-1, self._top_k), window=False)
        order = np.argsort(chosen, kind="stable")
        groups = list(self._groups(layer, chosen[order], x.dtype))
        reads = PromptReads(self._pager, layer, [group.experts for group in groups], Counter(chosen.tolist()))
        rows = x[mx.array(order // self._top_k)]
        parts, waiting = [], None
        for group, (matrices, readers) in zip(groups, self._unpacked(layer, reads, x.dtype), strict=True):
            at = slice(group.start, group.stop)
            parts.append(_through(rows[at], np.searchsorted(group.experts, chosen[order[at]]), *matrices))
            for reader in readers:
                reader.become(parts[-1])
            del matrices
            mx.async_eval(parts[-1])  # at most two groups are unpacked at any time
            if waiting is not None:
                with self.reader.waits.on_device():
                    mx.eval(waiting)
            waiting = parts[-1]
        if soon is not None:
            most = self._pager.slots(layer + 1) // AHEAD_SHARE
            self._pager.ahead(layer + 1, np.unique(self.reader.waits.values(soon)).tolist(), most)
        back = np.empty_like(order)
        back[order] = np.arange(order.size)
        return self._added(_joined(parts), mx.array(back.reshape(-1, self._top_k)), weights, shared)

    def _unpacked(
        self, layer: int, reads: PromptReads, dtype: mx.Dtype
    ) -> Iterator[tuple[tuple[mx.array, ...], list[Readers]]]:
        """Gate, up and down [n, in, out] of the experts of each group, whose parts are unpacked as they arrive.

        With each group come the readers that hold its parts, to become what the caller makes of them.
        """
        pieces, readers = [], []
        for experts, last in reads.parts():
            words = mx.array(self._pager.words(layer, np.array(experts), experts))
            pieces.append([expert_dequantize(words, self._pager.arena, m, dtype) for m in self._layers[layer]])
            readers.append(self._pager.reads(layer, pieces[-1], experts))
            mx.async_eval(pieces[-1])
            if last:
                group = tuple(_joined(matrix).swapaxes(-1, -2) for matrix in zip(*pieces, strict=True)), readers
                pieces, readers = [], []
                yield group
                del group

    def _groups(self, layer: int, chosen: np.ndarray, dtype: mx.Dtype) -> Iterator[Group]:
        """From each row's expert, ascending. They do not depend on what is in memory."""
        experts, starts = np.unique(chosen, return_index=True)
        size = self._group_size(layer, dtype)
        bounds = [*range(0, experts.size, size), experts.size]
        edges = np.append(starts, chosen.size)
        for a, b in pairwise(bounds):
            yield Group(int(edges[a]), int(edges[b]), experts[a:b])

    def _group_size(self, layer: int, dtype: mx.Dtype) -> int:
        return max(1, WORKSPACE_BYTES // self._layers[layer].unpacked_bytes(dtype))

    def _added(self, y: mx.array, places: mx.array, weights: mx.array, shared: mx.array) -> mx.array:
        """Outputs y [T * k, H], those of token t in the rows places[t] [k], weighted and added up -> [T, H]."""
        parts = [slice(i, i + TOKENS_AT_ONCE) for i in range(0, len(shared), TOKENS_AT_ONCE)]
        out = [
            expert_combine(y[places[part]].astype(mx.float32), weights[part], shared[part], y.dtype) for part in parts
        ]
        return _joined(out)


def _through(rows: mx.array, places: np.ndarray, gate: mx.array, up: mx.array, down: mx.array) -> mx.array:
    """Rows [n, H] through experts: those at ``places`` [n], ascending, of matrices [experts, in, out] -> [n, H]."""
    ids, x = mx.array(places.astype(np.uint32)), rows[:, None]
    h = nn.silu(gather_mm(x, gate, ids, True)) * gather_mm(x, up, ids, True)
    return gather_mm(h, down, ids, True)[:, 0]


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
