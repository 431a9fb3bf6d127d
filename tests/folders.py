"""Tiny Hugging Face folders whose experts can stream, of every type and layout, and what their tests share."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from checkpoints import fuse_experts, random_weights, with_prefix, write
from packs import fp8_weights, name_fp8, wide_config

EXPERTS, TOP_K = 12, 3
KINDS = ("BF16 fused", "BF16 per expert", "F16 fused", "F32 per expert", "FP8", "FP8, F32 scales", "mixed")


def folder_config(**changes: Any) -> dict[str, Any]:
    """12 experts of width 192 in each of two layers, of which a token uses 3."""
    return wide_config(**{"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, **changes})


@cache
def folder_weights(kind: str, mtp: bool = False) -> dict[str, Any]:
    """Weights by name in one of KINDS; float32 arrays of NumPy are those that are stored in the kind's type.

    The same dict every time; nobody may change it.
    """
    weights = random_weights(folder_config(), mtp=mtp)
    if kind.startswith("FP8"):
        coded = fp8_weights(weights)
        return {n: mx.array(v) if "F32" in kind and n.endswith("_scale_inv") else v for n, v in coded.items()}
    if kind == "mixed":  # a layer in BF16, and one whose gate is in BF16 and whose other matrices are in FP8
        plain = re.compile(r"\.layers\.0\.mlp\.experts\.|\.gate_proj\.|\.ngram_embedding\.")
        coded = fp8_weights({name: value for name, value in weights.items() if not plain.search(name)})
        return {name: value for name, value in weights.items() if plain.search(name)} | coded
    return fuse_experts(weights, EXPERTS) if "fused" in kind else weights


def write_folder(folder: Path, kind: str, mtp: bool = False, files: int = 3, **changes: Any) -> Path:
    """A folder of one of KINDS in several files, with the published prefix. changes: of weights, by their own names."""
    dtype = {"F16": mx.float16, "F32": mx.float32}.get(kind[:3], mx.bfloat16)
    weights = {name: value for name, value in {**folder_weights(kind, mtp), **changes}.items() if value is not None}
    write(folder, folder_config(), with_prefix(weights), dtype, files)
    for path in folder.glob("*.safetensors"):
        name_fp8(path)
    return folder


def decoded(kind: str) -> dict[str, np.ndarray]:
    """The same weights as float32 numbers, by a decoder of its own."""
    out, weights = {}, folder_weights(kind)
    for name, value in weights.items():
        if name.endswith(("_scale", "_scale_inv")):
            continue
        array = np.array(value)
        if array.dtype == np.uint8:
            scale = weights.get(f"{name}_scale_inv", weights.get(f"{name.split('.shard_')[0]}.weight_scale"))
            rounded = mx.array(np.array(scale)).astype(mx.float32 if isinstance(scale, mx.array) else mx.bfloat16)
            array = _numbers(array) * _over_tiles(np.array(rounded.astype(mx.float32)), array.shape)
        else:
            array = np.array(mx.array(array).astype(mx.bfloat16).astype(mx.float32))
        out[name] = array.astype(np.float32)
    return out


def _numbers(codes: np.ndarray) -> np.ndarray:
    """F8_E4M3: sign, four bits of exponent, three of fraction."""
    exponent, fraction = (codes >> 3 & 15).astype(int), (codes & 7) / 8
    size = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7))
    return np.where(codes >> 7, -size, size)


def _over_tiles(scale: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    if scale.size == 1:
        return scale.reshape(1, 1)
    return scale[np.arange(shape[0]) // 128][:, np.arange(shape[1]) // 128]
