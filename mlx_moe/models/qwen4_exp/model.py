"""Qwen3.8-Flash-Next (``qwen4_exp``): the text model and its multi-token-prediction layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_moe.cache import LayerCache, LinearCache, SparseCache, begin, commit
from mlx_moe.config import LINEAR, ModelConfig
from mlx_moe.models.layers import Embedding, Linear, RMSNorm
from mlx_moe.models.qwen4_exp.attention import SparseAttention
from mlx_moe.models.qwen4_exp.gated_delta_net import GatedDeltaNet
from mlx_moe.models.qwen4_exp.gated_residual import GatedResidual, inject
from mlx_moe.models.qwen4_exp.moe import MoE
from mlx_moe.models.qwen4_exp.ple import PLE
from mlx_moe.models.qwen4_exp.sources import ExpertSource, RowSource


class DecoderLayer(nn.Module):
    """[PLE], then a mixer (Gated DeltaNet or QSA) and an MoE, each behind a gated residual."""

    def __init__(self, config: ModelConfig, layer: int, kind: str):
        super().__init__()
        index = config.ple_index(layer) if layer < config.num_hidden_layers else None
        if index is not None:
            self.ple = PLE(config, index)
        if kind == LINEAR:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = SparseAttention(config)
        self.mlp = MoE(config, layer)
        self.attn_hyper_connection = GatedResidual(config)
        self.mlp_hyper_connection = GatedResidual(config)

    def pre_moe(self, s: mx.array, history: mx.array | None, cache: LayerCache, rows: RowSource) -> mx.array:
        """Everything up to the MoE: streams [B, T, S * H] -> streams. history: token ids, in layers with PLE."""
        if history is not None:
            s = s + self.ple(s, history, cache, rows)
        x, beta = self.attn_hyper_connection.split(s)
        mixer = self.linear_attn if "linear_attn" in self else self.self_attn
        return inject(s, beta, mixer(x, cache))

    def post_moe(self, s: mx.array, experts: ExpertSource) -> mx.array:
        """The MoE: streams -> streams."""
        x, beta = self.mlp_hyper_connection.split(s)
        return inject(s, beta, self.mlp(x, experts))

    def __call__(
        self, s: mx.array, history: mx.array | None, cache: LayerCache, experts: ExpertSource, rows: RowSource
    ) -> mx.array:
        return self.post_moe(self.pre_moe(s, history, cache, rows), experts)


class TextModel(nn.Module):
    """Embedding, decoder layers and the final mix."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, i, kind) for i, kind in enumerate(config.layer_types)]
        self.hyper_connection_mixer = GatedResidual(config, inject=False)


class MTP(nn.Module):
    """The draft layer: from the trunk's streams at t and the embedding of token t + 1, logits for token t + 2.

    e = RMSNorm(embedding), h = RMSNorm(s); stream i starts as fc_embedding e + fc_hidden h_i; one QSA decoder layer;
    its own final mix; the trunk's embedding and head. Its output streams are the s of a further draft step.
    ``per_stream_norm``: one rms per stream in pre_fc_norm_hidden (llama.cpp) instead of one over all (mlx-vlm).
    """

    def __init__(self, config: ModelConfig, per_stream_norm: bool = False):
        super().__init__()
        hidden, width = config.hidden_size, config.hc_count * config.hidden_size
        self._config, self._streams = config, config.hc_count
        groups = config.hc_count if per_stream_norm else 1
        self.pre_fc_norm_embedding = RMSNorm(hidden, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(width, config.rms_norm_eps, groups=groups)
        self.fc_embedding = Linear(hidden, hidden)
        self.fc_hidden = Linear(hidden, hidden)
        self.layers = [DecoderLayer(config, config.num_hidden_layers, "full_attention")]
        self.hyper_connection_mixer = GatedResidual(config, inject=False)

    def make_cache(self) -> list[LayerCache]:
        """A cache of its own; ``Model.make_cache`` never includes it."""
        return [SparseCache(self._config.indexer_compress_ratio)]

    def start(self, s: mx.array, embedded: mx.array) -> mx.array:
        """Streams s [B, T, S * H] and embeddings [B, T, H] of the tokens after them -> new streams [B, T, S * H]."""
        B, T, _ = s.shape
        e = self.fc_embedding(self.pre_fc_norm_embedding(embedded))
        h = self.pre_fc_norm_hidden(s).reshape(B, T, self._streams, -1)
        parts = [self.fc_hidden(h[:, :, i]) + e for i in range(self._streams)]
        return mx.concatenate(parts, axis=-1)


class Model(nn.Module):
    """The whole model, in mlx-lm's protocol: ``model(ids, cache=...) -> logits``, ``layers``, ``make_cache()``.

    It asks ``experts`` for routed experts and ``rows`` for n-gram rows, and knows nothing of where they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        experts: ExpertSource,
        rows: RowSource,
        mtp: bool = False,
        mtp_norm_per_stream: bool = False,
    ):
        """mtp: whether to build the draft layer; mtp_norm_per_stream: see MTP."""
        super().__init__()
        self._config, self._experts, self._rows = config, experts, rows
        self.model = TextModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if mtp:
            self.mtp = MTP(config, mtp_norm_per_stream)

    def bind(self) -> None:
        """Give the expert source the router weights, once they are loaded."""
        self._experts.bind(self._routers())

    def record_routing(self, file: Any) -> None:
        """Write what the routers say to a file (a path) from now on, until ``close``; see ``load_model``.

        Raises OSError naming the file.
        """
        embedded = self.model.embed_tokens(mx.zeros((1, 1), dtype=mx.int32))
        self._experts.record(file, self._routers(), embedded.dtype)

    def _routers(self) -> list[mx.array]:
        blocks = [*self.layers, *(self.mtp.layers if self.has_mtp else [])]
        return [layer.mlp.gate.dequantized() for layer in blocks]

    @property
    def config(self) -> ModelConfig:
        """The configuration that the model was built from."""
        return self._config

    @property
    def model_type(self) -> str:
        """mlx-lm's name of the architecture."""
        return "qwen4_exp"

    @property
    def layers(self) -> list[DecoderLayer]:
        """The decoder layers, without MTP."""
        return self.model.layers

    @property
    def has_mtp(self) -> bool:
        """Whether the checkpoint brought a multi-token-prediction layer."""
        return "mtp" in self

    def make_cache(self) -> list[LayerCache]:
        """One empty cache per layer."""
        c, caches = self._config, []
        for i, kind in enumerate(c.layer_types):
            if kind != LINEAR:
                caches.append(SparseCache(c.indexer_compress_ratio))
            elif c.ple_index(i) is None:
                caches.append(LinearCache(c.linear_conv_kernel_dim - 1))
            else:
                caches.append(LinearCache(c.linear_conv_kernel_dim - 1, c.ngram_size - 1, c.ple_conv_span))
        return caches

    def __call__(
        self, inputs: mx.array, cache: Sequence[LayerCache] | None = None, mask: mx.array | str | None = None
    ) -> mx.array:
        """Token ids [B, T] -> logits [B, T, V] in the model's type; advances the cache in place.

        Rows of a batch have equal length; a mask that hides anything (left padding) raises ValueError.
        """
        if mask is not None and mask != "causal" and not bool(mx.all(mx.array(mask).astype(mx.bool_))):
            raise ValueError("padding masks are not supported: pass rows of equal length")
        return self.forward(inputs, cache)[0]

    def forward(self, ids: mx.array, cache: Sequence[LayerCache] | None = None) -> tuple[mx.array, mx.array]:
        """Token ids [B, T] -> logits [B, T, V] and the streams [B, T, S * H] that MTP takes."""
        s = self.streams(ids, cache)
        return self.head(s), s

    def streams(self, ids: mx.array, cache: Sequence[LayerCache] | None = None) -> mx.array:
        """Token ids [B, T] -> the stream state [B, T, S * H] after the last layer."""
        ids = self._check_ids(ids)
        cache = self.make_cache() if cache is None else cache
        if len(cache) != len(self.layers):
            raise ValueError(f"the cache has {len(cache)} layers; the model has {len(self.layers)}")
        if len({layer.offset for layer in cache}) > 1:
            raise ValueError("the cache's layers hold different numbers of tokens: a pass was interrupted; start again")
        with self._whole(cache):
            self._experts.begin(ids)
            histories = [self._history(layer, ids, part) for layer, part in zip(self.layers, cache, strict=True)]
            s = mx.tile(self.model.embed_tokens(ids), (1, 1, self._config.hc_count))
            for layer, history, part in zip(self.layers, histories, cache, strict=True):
                s = layer(s, history, part, self._experts, self._rows)
        return s

    @contextlib.contextmanager
    def _whole(self, cache: Sequence[LayerCache]) -> Iterator[None]:
        """A pass that happens as a whole or, after an error or an interrupt, leaves cache and sources as they were."""
        marks = [layer.mark() for layer in cache]
        try:
            yield
        except BaseException:
            for layer, mark in zip(cache, marks, strict=True):
                layer.restore(mark)
            self._experts.abort()
            self._rows.abort()
            raise

    def _history(self, layer: DecoderLayer, ids: mx.array, cache: LayerCache) -> mx.array | None:
        """The ids that a PLE layer's rows depend on, announced to the row source before the pass starts."""
        if "ple" not in layer:
            return None
        history = cache.ple_history(ids, self._config.eos_token_ids[0])
        self._rows.prepare(layer.ple.index, history, ids.shape[1])
        return history

    def begin(self, cache: Sequence[LayerCache]) -> None:
        """Open a window: what follows, up to 8 tokens in one or several passes, can be taken back."""
        begin(cache)

    def commit(self, cache: Sequence[LayerCache], keep: int) -> None:
        """Close the window, keep its first ``keep`` tokens, and tell the expert source."""
        commit(cache, keep)
        self._experts.commit(keep)

    def rollback(self, cache: Sequence[LayerCache], count: int) -> None:
        """Close the window and drop its last ``count`` tokens."""
        self.commit(cache, cache[0].window - count)

    def resize_experts(self, slots: int) -> None:
        """Keep ``slots`` experts per layer in memory from now on, those used last; call it between requests.

        Output stays the same. Raises ValueError where experts are not streamed, or so many do not fit; OSError when
        one cannot be read.
        """
        self._experts.resize(slots)

    def relieve_memory(self) -> None:
        """Where the system is short of memory, keep fewer experts in memory from now on, unless their number was given.

        Called before each text is generated; output stays the same. Raises OSError when one cannot be read.
        """
        self._experts.relieve()

    @property
    def experts_stats(self) -> Any:
        """Counters of streaming since the model was loaded, a paging.statistics.ExpertStats; None without streaming."""
        return self._experts.statistics()

    @property
    def experts(self) -> ExpertSource:
        """Where routed experts come from."""
        return self._experts

    @contextlib.contextmanager
    def taking_experts_from(self, source: ExpertSource) -> Iterator[None]:
        """Passes inside ask another source for routed experts; windows end on the side where they began."""
        own, self._experts = self._experts, source
        try:
            yield
        finally:
            self._experts = own

    def close(self) -> None:
        """End the threads that read, close the files, give the experts' memory back. The model cannot be used after.

        ``with`` does it at its end, and a model that is forgotten does it by itself.
        """
        try:
            self._experts.close()
        finally:
            self._rows.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def head(self, s: mx.array) -> mx.array:
        """Streams [B, T, S * H] -> logits [B, T, V]."""
        return self.lm_head(self.model.hyper_connection_mixer(s))

    def draft(self, s: mx.array, next_ids: mx.array, cache: Sequence[LayerCache]) -> tuple[mx.array, mx.array]:
        """One MTP pass.

        Args:
            s: [B, T, S * H], the trunk's streams at t (or the streams that an earlier draft step returned).
            next_ids: [B, T], the tokens at t + 1.
            cache: from ``model.mtp.make_cache()``.

        Returns:
            logits [B, T, V] for the tokens at t + 2, and streams for a further step.
        """
        if not self.has_mtp:
            raise ValueError("this checkpoint has no MTP layer")
        ids = self._check_ids(next_ids)
        with self._whole(cache):
            self._experts.begin(ids)
            s = self.mtp.start(s, self.model.embed_tokens(ids))
            s = self.mtp.layers[0](s, None, cache[0], self._experts, self._rows)
        return self.lm_head(self.mtp.hyper_connection_mixer(s)), s

    def _check_ids(self, ids: mx.array) -> mx.array:
        if ids.ndim != 2 or ids.size == 0:
            raise ValueError(f"token ids have shape {tuple(ids.shape)}; needed: [rows, tokens], both at least 1")
        return ids.astype(mx.int32)
