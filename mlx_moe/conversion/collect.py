"""Importances out of text: how large the inputs of every expert's columns are, seen by a model with experts in memory.

The mean squared input of a column says how much an error in its weights costs. Inputs are those of prompts, so of many
tokens at once, at the model's own routing: an expert sees only the tokens that chose it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_moe.models.layers import WINDOW
from mlx_moe.models.qwen4_exp import Model
from mlx_moe.paging.resident import ResidentExperts

SMOOTHING = 4.0
"""How many tokens' worth of the layer's mean every expert starts with: rare experts are not left to one or two."""


class SquaredInputs:
    """Sums of squared inputs of one matrix per expert, [experts, columns] float32."""

    def __init__(self, experts: int, columns: int):
        self.sums, self.counts = mx.zeros((experts, columns)), mx.zeros((experts, 1))

    def add(self, rows: mx.array, ids: mx.array) -> None:
        """rows [N, ..., 1, columns] with the expert ids [N, ...] that they go through."""
        flat, ids = rows.reshape(-1, rows.shape[-1]).astype(mx.float32), ids.reshape(-1)
        self.sums = self.sums.at[ids].add(flat * flat)
        self.counts = self.counts.at[ids].add(mx.ones((ids.size, 1)))

    def means(self) -> mx.array:
        """[experts, columns]: the mean of each, drawn to that of all by ``SMOOTHING`` tokens."""
        overall = self.sums.sum(axis=0, keepdims=True) / mx.maximum(self.counts.sum(), 1)
        return (self.sums + SMOOTHING * overall) / (self.counts + SMOOTHING)


def collect(
    model: Model, ids: Sequence[int], context: int = 2048, progress: Callable[[int, int], None] | None = None
) -> dict[str, mx.array]:
    """Run token ids through a model, ``context`` at a time and each from an empty cache.

    Args:
        progress: called with the number of tokens done and to do.

    Returns:
        [experts, columns] float32 by canonical name of the weight, as ``read_importances`` reads them.

    Raises ValueError for a model whose experts are not plain in memory, or a text that is too short.
    """
    if not isinstance(model._experts, ResidentExperts):
        raise ValueError("importances come from a model folder (BF16, FP8 or packed by MLX), not from GGUF or a pack")
    if len(ids) <= WINDOW or context <= WINDOW:
        raise ValueError(f"{len(ids)} tokens, {context} at a time; needed: more than {WINDOW} of both")
    seen: dict[str, SquaredInputs] = {}
    layers = model._experts.layers[: len(model.layers)]
    try:
        for i, layer in enumerate(layers):
            layer.watch = _watch(seen, f"model.layers.{i}.mlp.experts", model.config.num_experts)
        _run(model, ids, context, seen, progress)
    finally:
        for layer in layers:
            layer.watch = None
    return {name: squares.means() for name, squares in seen.items()}


def _watch(seen: dict[str, SquaredInputs], layer: str, experts: int) -> Callable[[str, mx.array, mx.array], None]:
    def watch(part: str, rows: mx.array, ids: mx.array) -> None:
        name = f"{layer}.{part}.weight"
        if name not in seen:
            seen[name] = SquaredInputs(experts, rows.shape[-1])
        seen[name].add(rows, ids)

    return watch


def _run(
    model: Model,
    ids: Sequence[int],
    context: int,
    seen: dict[str, SquaredInputs],
    progress: Callable[[int, int], None] | None,
) -> None:
    for start in range(0, len(ids), context):
        part = ids[start : start + context]
        if len(part) > WINDOW:  # shorter ones run as windows do, unsorted; the rest of a text is not worth it
            model.streams(mx.array([part]))
            mx.eval([(squares.sums, squares.counts) for squares in seen.values()])
        if progress is not None:
            progress(min(start + context, len(ids)), len(ids))
