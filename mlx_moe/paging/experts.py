"""Experts in the arena: the expert source of models whose experts lie in files as packed blocks.

Ties index, reader and arena together. Today every expert gets a slot when the model is loaded, and nothing waits while
a window runs.

Invariants: a layer's row of slot words is owned here, in NumPy, and enters a graph as a fresh array; a word stands in
the row only while its slot holds that expert's whole record. Slots are written before the first graph is built.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from custom_kernels.dequant_gemv import (
    Matrix,
    expert_combine,
    expert_dequantize,
    expert_down,
    expert_gate_up,
)
from custom_kernels.ggml_blocks import format_by_name
from custom_kernels.moce_route import moce_route, plain_route
from custom_kernels.slots import NO_SLOT
from mlx_moe.config import ModelConfig
from mlx_moe.models.layers import WINDOW, gather_mm
from mlx_moe.paging.arena import MAX_CHUNK_BYTES, SlotArena
from mlx_moe.paging.index import ExpertIndex, LayerIndex, PartIndex
from mlx_moe.paging.reader import THREADS, ExpertReader, Fill

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 256 << 20
"""Unpacked matrices of the experts that a prompt runs through at once."""
TOKENS_AT_ONCE = 512
"""Of a prompt, when its experts' outputs are added up in float32."""
REPORT_EVERY_S = 5.0


class Matrices(NamedTuple):
    """Where the matrices of a layer's experts are in their records."""

    gate: Matrix
    up: Matrix
    down: Matrix

    @classmethod
    def of(cls, layer: LayerIndex) -> Matrices:
        """Those of a layer. Raises ValueError for a part whose length is not that of its rows."""
        return cls(*(_matrix(part, at) for part, at in zip(layer.parts, layer.places, strict=True)))

    def unpacked_bytes(self, dtype: mx.Dtype) -> int:
        """Bytes of one expert's numbers."""
        return sum(matrix.rows * matrix.columns for matrix in self) * dtype.size


class ArenaExperts:
    """An expert source (models.qwen4_exp.sources.ExpertSource) whose experts stand in the arena, still packed.

    Mixing weights stay float32, whatever the model computes in.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: ExpertIndex,
        budget_bytes: int,
        most_chunk_bytes: int = MAX_CHUNK_BYTES,
        threads: int = THREADS,
    ) -> None:
        """Allocate memory for every expert; ``fill`` reads them.

        Args:
            index: of every MoE layer, the draft layer's last.
            budget_bytes, most_chunk_bytes: see SlotArena.
            threads: that read.

        Raises ValueError when they do not fit into memory.
        """
        self._top_k, self._normalize = config.num_experts_per_tok, config.norm_topk_prob
        self._index, self._layers = index, [Matrices.of(layer) for layer in index.layers]
        self._words = np.full((len(index.layers), config.num_experts), NO_SLOT, dtype=np.uint32)
        self._slots = SlotArena(
            [(layer.record_bytes, layer.experts) for layer in index.layers], budget_bytes, most_chunk_bytes
        )
        self._reader = ExpertReader(index, threads)

    @property
    def kernels(self) -> frozenset[tuple[str, str]]:
        """See ExpertSource."""
        found = {("moce_route", ""), ("expert_combine", "")}
        for gate, up, down in self._layers:
            found |= {("expert_gate_up", f"{gate.format.name}+{up.format.name}"), ("expert_down", down.format.name)}
            found |= {("expert_dequantize", matrix.format.name) for matrix in (gate, up, down)}
        return frozenset(found)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self._slots.nbytes

    def fill(self) -> None:
        """Give every expert a slot and read it, before anything else; the log says how far it is.

        Raises OSError, naming file and expert, when one cannot be read.
        """
        layers = self._index.layers
        words = [[self._slots.allocate(layer.record_bytes) for _ in range(layer.experts)] for layer in layers]
        fills = (
            Fill(layer, expert, self._slots.view(word, layers[layer].record_bytes))
            for layer, row in enumerate(words)
            for expert, word in enumerate(row)
        )
        total, done, said = sum(layer.experts * layer.record_bytes for layer in layers), 0, time.monotonic()
        for nbytes in self._reader.fill(fills):
            done += nbytes
            if time.monotonic() - said > REPORT_EVERY_S:
                said = time.monotonic()
                logger.info("experts: %.1f of %.1f GB read", done / 1e9, total / 1e9)
        self._words[:] = words
        self._reader.close()

    def bind(self, routers: Sequence[mx.array]) -> None:
        """Nothing is read ahead, so the routers are not needed."""

    def begin(self, window_ids: mx.array) -> None:
        """Nothing is pinned."""

    def commit(self, accepted: int) -> None:
        """Nothing is released."""

    def moe(self, layer: int, x: mx.array, logits: mx.array, shared: mx.array, phase: str = "decode") -> mx.array:
        """See ExpertSource. Windows run fused, 8 tokens at a time; prompts by expert, which waits for the ids."""
        if phase == "prefill":
            return self._prompt(layer, x, logits, shared)
        parts = [slice(i, i + WINDOW) for i in range(0, len(x), WINDOW)]
        return _joined([self._window(layer, x[part], logits[part], shared[part]) for part in parts])

    def _window(self, layer: int, x: mx.array, logits: mx.array, shared: mx.array) -> mx.array:
        """Up to 8 tokens."""
        gate, up, down = self._layers[layer]
        routing = moce_route(logits, mx.array(self._words[layer]), self._top_k, normalize=self._normalize)
        h = expert_gate_up(x, routing.words, self._slots.arena, gate, up)
        partials = expert_down(h, routing.words, self._slots.arena, down)
        return expert_combine(partials, routing.weights, shared, x.dtype)

    def _prompt(self, layer: int, x: mx.array, logits: mx.array, shared: mx.array) -> mx.array:
        """Many tokens: rows of one expert stand together, and experts are unpacked a group at a time."""
        ids, weights = plain_route(logits, self._top_k, self._normalize)
        mx.async_eval(ids)
        mx.async_eval(shared)  # on its own, or the ids would be ready only when this is
        chosen = np.array(ids).reshape(-1)
        order = np.argsort(chosen, kind="stable")
        rows = x[mx.array(order // self._top_k)]
        parts, waiting = [], None
        for start, stop, experts in self._groups(layer, chosen[order], x.dtype):
            parts.append(self._through(layer, rows[start:stop], chosen[order[start:stop]], experts))
            mx.async_eval(parts[-1])  # at most two groups are unpacked at any time
            if waiting is not None:
                mx.eval(waiting)
            waiting = parts[-1]
        back = np.empty_like(order)
        back[order] = np.arange(order.size)
        return self._added(_joined(parts), mx.array(back.reshape(-1, self._top_k)), weights, shared)

    def _groups(self, layer: int, chosen: np.ndarray, dtype: mx.Dtype) -> Iterator[tuple[int, int, np.ndarray]]:
        """(first row, row after the last, experts) of every group, from each row's expert, ascending."""
        experts, starts = np.unique(chosen, return_index=True)
        size = max(1, WORKSPACE_BYTES // self._layers[layer].unpacked_bytes(dtype))
        bounds = [*range(0, experts.size, size), experts.size]
        edges = np.append(starts, chosen.size)
        for a, b in pairwise(bounds):
            yield int(edges[a]), int(edges[b]), experts[a:b]

    def _through(self, layer: int, rows: mx.array, chosen: np.ndarray, experts: np.ndarray) -> mx.array:
        """Rows [n, H] through their experts, of which ``experts`` are all, ascending -> [n, H]."""
        words = mx.array(self._words[layer][experts])
        gate, up, down = (
            expert_dequantize(words, self._slots.arena, matrix, rows.dtype).swapaxes(-1, -2)
            for matrix in self._layers[layer]
        )
        ids = mx.array(np.searchsorted(experts, chosen).astype(np.uint32))
        x = rows[:, None]
        h = nn.silu(gather_mm(x, gate, ids, True)) * gather_mm(x, up, ids, True)
        return gather_mm(h, down, ids, True)[:, 0]

    def _added(self, y: mx.array, places: mx.array, weights: mx.array, shared: mx.array) -> mx.array:
        """Outputs y [T * k, H], those of token t in the rows places[t] [k], weighted and added up -> [T, H]."""
        parts = [slice(i, i + TOKENS_AT_ONCE) for i in range(0, len(shared), TOKENS_AT_ONCE)]
        out = [
            expert_combine(y[places[part]].astype(mx.float32), weights[part], shared[part], y.dtype) for part in parts
        ]
        return _joined(out)


def _matrix(part: PartIndex, at: int) -> Matrix:
    rows, columns = part.shape
    matrix = Matrix(format_by_name(part.format), rows, columns, at)
    if part.length != rows * matrix.row_bytes:
        raise ValueError(f"{part.length} bytes for {part.shape} weights of {part.format}; needed: whole rows")
    return matrix


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
