"""Importances of columns, by which quantisers weigh errors.

A safetensors file of float32 tensors. A tensor is called as the weight that it is for, by canonical name
(``model.layers.3.mlp.experts.gate_up_proj.weight``, ``….down_proj.weight``), and is [columns], or [experts, columns].
An entry is the mean squared input of a column; only ratios within a row matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from mlx_moe.config import ConfigError, ModelConfig
from mlx_moe.formats.safetensors import FileFormatError, load_tensors

Importances = Mapping[str, mx.array]
"""[1, columns] or [experts, columns] float32 by canonical name."""


def read_importances(path: str | Path, layers: tuple[str, ...], config: ModelConfig) -> dict[str, mx.array]:
    """Read and check a file for the experts of these layers; layers that it leaves out count as all equal.

    Raises FileFormatError, naming the tensor, when one is of another model, has another shape, or holds NaN, infinity
    or a negative number.
    """
    columns = {"gate_up_proj": config.hidden_size, "down_proj": config.moe_intermediate_size}
    want = {f"{layer}.mlp.experts.{part}.weight": count for layer in layers for part, count in columns.items()}
    out = {}
    for name, array in load_tensors(path).items():
        where = f"{path}: tensor {name[:120]!r}"
        if name not in want:
            raise FileFormatError(f"{where} is of no experts of this model; needed: names as {min(want)}")
        shapes = ((want[name],), (config.num_experts, want[name]))
        if array.shape not in shapes or not mx.issubdtype(array.dtype, mx.floating):
            raise FileFormatError(f"{where} is {array.dtype} {array.shape}; needed: floats {shapes[0]} or {shapes[1]}")
        array = array.astype(mx.float32).reshape(-1, want[name])
        if not (mx.isfinite(array) & (array >= 0)).all().item():
            raise FileFormatError(f"{where} holds NaN, infinity or a negative number")
        out[name] = array
    if not out:
        raise ConfigError(f"{path}: holds no importances")
    return out


def importance(importances: Importances, layer: str, part: str, expert: int) -> mx.array | None:
    """[columns] of one expert's matrix (part is gate, up or down), or None."""
    array = importances.get(f"{layer}.mlp.experts.{'down' if part == 'down' else 'gate_up'}_proj.weight")
    return None if array is None else array[expert if len(array) > 1 else 0]
