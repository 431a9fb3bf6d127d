"""All experts and all n-gram rows in memory: nothing to wait for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from custom_kernels.moce_route import moce_route, plain_route
from mlx_moe.config import ModelConfig
from mlx_moe.models.layers import WINDOW, Embedding, ExpertLinear
from mlx_moe.paging.ngram import NgramHash
from mlx_moe.paging.recorder import RoutingRecorder, fingerprint
from mlx_moe.paging.trace import KEPT, TraceHeader, TraceWriter

Watch = Callable[[str, mx.array, mx.array], None]
"""Sees what goes into ``gate_up_proj`` or ``down_proj``: its name, rows [N, ..., 1, columns], expert ids [N, ...]."""


class LayerExperts(nn.Module):
    """The routed experts of one layer: gate and up rows joined (gate first), and down.

    ``watch`` sees the inputs of both, None by default.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = ExpertLinear(config.num_experts, hidden, 2 * width)
        self.down_proj = ExpertLinear(config.num_experts, width, hidden)
        self.watch: Watch | None = None

    def __call__(self, x: mx.array, ids: mx.array, sorted_ids: bool = False) -> mx.array:
        """x [N, ..., 1, H] with expert ids [N, ...] -> [N, ..., 1, H]."""
        gate, up = mx.split(self.gate_up_proj(x, ids, sorted_ids), 2, axis=-1)
        h = nn.silu(gate) * up
        if self.watch is not None:
            self.watch("gate_up_proj", x, ids)
            self.watch("down_proj", h, ids)
        return self.down_proj(h, ids, sorted_ids)


class ResidentExperts(nn.Module):
    """An expert source (models.qwen4_exp.sources.ExpertSource) that holds every expert."""

    def __init__(self, config: ModelConfig, layers: int):
        super().__init__()
        self._top_k, self._normalize = config.num_experts_per_tok, config.norm_topk_prob
        self._words = mx.arange(config.num_experts, dtype=mx.uint32)  # expert e is page e of the only chunk
        mx.eval(self._words)
        self.layers = [LayerExperts(config) for _ in range(layers)]
        self._trunk, self._recorder = config.num_hidden_layers, None

    @property
    def kernels(self) -> frozenset[tuple[str, str]]:
        """See ExpertSource."""
        return frozenset({("moce_route", "")})

    def bind(self, routers: Sequence[mx.array]) -> None:
        """Nothing is read ahead, so the routers are not needed."""

    def record(self, file: str | Path, routers: Sequence[mx.array], dtype: mx.Dtype) -> None:
        """See ExpertSource. The recording holds routing only, for nothing streams."""
        none = (0,) * len(routers)
        header = TraceHeader(
            fingerprint=fingerprint(routers),
            experts=tuple(len(weight) for weight in routers),
            top_k=self._top_k,
            normalize=self._normalize,
            trunk=self._trunk,
            record_bytes=none,
            group_sizes=none,
            kept=max(self._top_k, KEPT),
            window=WINDOW,
            read_ahead=False,
            moce=None,
        )
        self._recorder = RoutingRecorder(TraceWriter(file, header), header)
        weakref.finalize(self, self._recorder.close)

    def begin(self, window_ids: mx.array) -> None:
        """Nothing is pinned."""
        if self._recorder is not None:
            self._recorder.begin(*window_ids.shape)

    def commit(self, accepted: int) -> None:
        """Nothing is released."""
        if self._recorder is not None:
            self._recorder.commit(accepted)

    def abort(self) -> None:
        """Nothing is read."""
        if self._recorder is not None:
            self._recorder.interrupted()

    def resize(self, slots: int) -> None:
        """Refused, with a ValueError."""
        raise ValueError("the experts of this model are not streamed, so their number in memory is fixed")

    def relieve(self) -> None:
        """Nothing can be given back."""

    def statistics(self) -> None:
        """Nothing is counted."""

    def close(self) -> None:
        """Only a recording is open."""
        if self._recorder is not None:
            self._recorder.close()

    def moe(self, layer: int, x: mx.array, logits: mx.array, shared: mx.array, phase: str = "decode") -> mx.array:
        """See ExpertSource. Windows run expert by expert of each token; prompts sorted by expert."""
        if self._recorder is not None:
            self._recorder.routed(layer, logits, phase == "prefill")
        if phase == "decode":
            ids, weights = self._route(logits)
            y = self.layers[layer](x[:, None, None], ids)[:, :, 0]
        else:
            ids, weights = plain_route(logits, self._top_k, self._normalize)
            y = self._sorted(self.layers[layer], x, ids)
        weights = weights.astype(x.dtype).astype(mx.float32)
        routed = (y.astype(mx.float32) * weights[..., None]).sum(axis=-2)
        return (routed + shared.astype(mx.float32)).astype(x.dtype)

    def _route(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """ids and weights [T, k]. Batches of windows go in parts of a window's size, so that all take the same path."""
        parts = [
            moce_route(logits[i : i + WINDOW], self._words, self._top_k, normalize=self._normalize)
            for i in range(0, len(logits), WINDOW)
        ]
        if len(parts) == 1:
            return parts[0].ids, parts[0].weights
        return mx.concatenate([part.ids for part in parts]), mx.concatenate([part.weights for part in parts])

    def _sorted(self, experts: LayerExperts, x: mx.array, ids: mx.array) -> mx.array:
        """[T, H], [T, k] -> [T, k, H] for many tokens: rows of one expert stand together."""
        flat = ids.reshape(-1)
        order = mx.argsort(flat)
        y = experts(x[order // ids.shape[-1]][:, None], flat[order], sorted_ids=True)[:, 0]
        return y[mx.argsort(order)].reshape(*ids.shape, -1)


class ResidentRows(nn.Module):
    """A row source (models.qwen4_exp.sources.RowSource) that holds every n-gram table."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self._hashes = [NgramHash.from_config(config, i) for i in range(len(config.ple_layer_ids))]
        width = config.ple_embed_dim // config.ngram_heads
        self.tables = [Embedding(table.rows, width) for table in self._hashes]

    @property
    def kernels(self) -> frozenset[tuple[str, str]]:
        """See RowSource."""
        return frozenset()

    def prepare(self, index: int, history: mx.array, count: int) -> None:
        """Nothing is read."""

    def rows(self, index: int, history: mx.array, count: int) -> mx.array:
        """See RowSource."""
        ids = self._hashes[index].row_ids(history, count)
        return self.tables[index](ids).reshape(*ids.shape[:2], -1)

    def abort(self) -> None:
        """Nothing is read."""

    def close(self) -> None:
        """Nothing is open."""
