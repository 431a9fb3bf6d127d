"""How windows are routed, plainly or with a preference for experts in memory, and what that preference changed.

Counters wait for nothing of their own: how many picks were substituted comes with the ids, which are fetched anyway,
and divergences are looked at one pass later.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from custom_kernels.moce_route import Policy, Routing, moce_route
from mlx_moe.config import ModelConfig
from mlx_moe.paging.moce import MoceConfig


class WindowRouter:
    """Routes windows of every layer of a model that streams, and counts for ExpertStats."""

    def __init__(self, config: ModelConfig, experts: Sequence[int], moce: MoceConfig | None) -> None:
        """experts: of each layer. Raises ValueError naming the setting that does not suit the model."""
        if moce is not None:
            moce.check(config.num_experts_per_tok)
        self._top_k, self._normalize = config.num_experts_per_tok, config.norm_topk_prob
        self._moce = moce if moce is not None and moce.bonus else None
        self._experts = list(experts)
        self._picks, self._substituted = [0] * len(experts), [0] * len(experts)
        self._kl, self._waiting = [0.0] * len(experts), [None] * len(experts)

    @property
    def moce(self) -> MoceConfig | None:
        """How residents are preferred; None where they are not."""
        return self._moce

    @property
    def biased(self) -> bool:
        """Whether experts in memory go before others."""
        return self._moce is not None

    def counters(self) -> dict[str, tuple[float, ...]]:
        """The fields of ExpertStats that are counted here; waits for the last pass."""
        for layer in range(len(self._kl)):
            self._fold(layer)
        found = {"layer_picks": self._picks, "layer_substituted": self._substituted, "layer_kl": self._kl}
        return {name: tuple(values) for name, values in found.items()}

    def route(self, layer: int, logits: mx.array, words: mx.array) -> Routing:
        """Logits [T, E] float32 and slot words [E] to experts; see custom_kernels.moce_route."""
        policy = None if self._moce is None else self._policy(layer)
        return moce_route(logits, words, self._top_k, policy, self._normalize)

    def queue(self, layer: int, logits: mx.array, routing: Routing) -> None:
        """Have the device work on what ``count`` will need; the ids come first."""
        if self._moce is None:
            mx.async_eval(routing.ids)
            return
        mx.async_eval(routing.ids, routing.counts)  # of one kernel
        if self._moce.measure:
            self._fold(layer)
            self._waiting[layer] = divergence(logits, routing.ids)
            mx.async_eval(self._waiting[layer])

    def count(self, layer: int, routing: Routing) -> None:
        """Count a window whose ids have been fetched."""
        self._picks[layer] += routing.ids.size
        if self._moce is not None:
            self._substituted[layer] += int(np.array(routing.counts)[1])

    def _policy(self, layer: int) -> Policy:
        moce, experts = self._moce, self._experts[layer]
        return Policy(moce.bonus, moce.keep_top, experts if moce.max_rank is None else min(moce.max_rank, experts))

    def _fold(self, layer: int) -> None:
        """The divergence of the layer's last pass, done long ago while passes go on."""
        if self._waiting[layer] is not None:
            self._kl[layer] += self._waiting[layer].item()
            self._waiting[layer] = None


def divergence(logits: mx.array, ids: mx.array) -> mx.array:
    """``divergences`` summed over tokens."""
    return divergences(logits, ids).sum()


def divergences(logits: mx.array, ids: mx.array) -> mx.array:
    """How much further from the router's distribution p the used mixtures are than the true ones: [T] float32.

    A mixture q is p on its experts S, renormalised, so KL(q, p) = -ln p(S). Of the experts S that were chosen and the
    true best S*, the difference is ln p(S*) - ln p(S): 0 where they are the same, and always finite.

    Args:
        logits: [T, E] float32. ids: [T, k], chosen.
    """
    best = mx.topk(logits, ids.shape[-1], axis=-1)
    chosen = mx.take_along_axis(logits, ids, axis=-1)
    found = mx.logsumexp(best, axis=-1) - mx.logsumexp(chosen, axis=-1)
    return mx.maximum(found, 0.0)  # equal sets in another order may differ in the last bit
