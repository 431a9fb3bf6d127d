"""Sources of conversions: FP8 checkpoints, and models with widths that blocks of ggml divide."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from checkpoints import fuse_experts, random_weights, tiny_config, with_prefix, write
from mlx_moe.runtime import load_model, quantize_model, save_model

WIDE = {
    "hidden_size": 256,
    "moe_intermediate_size": 192,
    "vocab_size": 131,
    "ple_embed_dim": 256,
    "ple_layer_ids": [1],
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 5,
    "shared_expert_intermediate_size": 96,
}
"""Changes for ``tiny_config``: experts of width 192, an odd vocabulary, an odd number of experts."""
LAYOUTS = ("fused", "per_expert", "fp8")


def wide_config(**changes: Any) -> dict[str, Any]:
    """A config.json with the WIDE shapes."""
    return tiny_config(**{**WIDE, **changes})


def encode_fp8(array: np.ndarray) -> np.ndarray:
    """float32 -> the nearest F8_E4M3 codes, uint8, by a table of all of them."""
    codes = np.arange(127, dtype=np.uint8)  # 127 is NaN
    exponent, fraction = codes >> 3, (codes & 7) / 8
    values = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent.astype(int) - 7))
    middles = (values[1:] + values[:-1]) / 2
    nearest = np.searchsorted(middles, np.abs(array)).astype(np.uint8)
    return nearest | (np.signbit(array).astype(np.uint8) << 7)


def fp8_weights(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts in FP8 with a scale per 128 x 128 block, tables with one for all; codes as uint8."""
    out: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        if re.search(r"\.experts\.\d+\.", name):
            out[name], out[name + "_scale_inv"] = _block_fp8(array)
        elif ".ngram_embedding.shard_" in name:
            out[name] = encode_fp8(array / 0.01)
            out[name.split(".shard_")[0] + ".weight_scale"] = np.array([0.01], dtype=np.float32)
        else:
            out[name] = array
    return out


def _block_fp8(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = array.shape
    down, across = np.arange(rows) // 128, np.arange(columns) // 128
    scale = np.zeros((down[-1] + 1, across[-1] + 1), dtype=np.float32)
    np.maximum.at(scale, (down[:, None], across[None]), np.abs(array) / 448)
    return encode_fp8(array / scale[down][:, across]), scale


def write_layout(folder: Path, raw: dict[str, Any], layout: str, mtp: bool = False, files: int = 2) -> Path:
    """A checkpoint of random BF16 weights (seed 0) in one of LAYOUTS, in several files, with the published prefix."""
    weights = random_weights(raw, mtp=mtp)
    if layout == "fp8":
        weights = fp8_weights(weights)
    elif layout == "fused":
        weights = fuse_experts(weights, raw["text_config"]["num_experts"])
    write(folder, raw, with_prefix(weights), mx.bfloat16, files)
    if layout == "fp8":
        for path in folder.glob("*.safetensors"):
            name_fp8(path)
    return folder


def name_fp8(path: Path) -> None:
    """MLX writes codes as U8; their type is called F8_E4M3 in published files. Scales in BF16 stay."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = data[8 : 8 + size].replace(b'"U8"', b'"F8_E4M3"')
    path.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + size :])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_quantized(folder: Path, raw: dict[str, Any], source: Path) -> Path:
    """A checkpoint of random weights (made in ``source``) as ``mx.quantize`` packs it."""
    model, config = load_model(write(source, raw, random_weights(raw), mx.bfloat16), dtype=mx.bfloat16)
    save_model(folder, quantize_model(model, bits=4, group_size=32), config)
    return folder
