"""Prompt caches on disk, as safetensors. (mlx-lm's own loader finds cache classes in its own module only.)"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_moe.cache import LayerCache, LinearCache, SparseCache
from mlx_moe.formats.checkpoint import atomic_path
from mlx_moe.formats.safetensors import FileFormatError, load_tensors, read_header
from mlx_moe.models.qwen4_exp import Model

FORMAT_VERSION = 1
_CLASSES = {cls.__name__: cls for cls in (LinearCache, SparseCache)}


def save_prompt_cache(
    file_name: str | Path, cache: Sequence[LayerCache], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a cache. The file appears whole or not at all.

    Args:
        metadata: strings to find again, such as the model's name.
    """
    arrays: dict[str, mx.array] = {}
    layers = []
    for i, layer in enumerate(cache):
        numbers = {}
        for field, value in zip(layer.FIELDS, layer.state, strict=True):
            if isinstance(value, mx.array):
                arrays[f"{i}.{field}"] = value
            elif value is not None:
                numbers[field] = value
        layers.append({"class": type(layer).__name__, **numbers})
    header = {
        "format_version": str(FORMAT_VERSION),
        "layers": json.dumps(layers),
        "user": json.dumps(dict(metadata or {})),
    }
    with atomic_path(Path(file_name)) as temporary:
        mx.save_safetensors(str(temporary), arrays, header)


def load_prompt_cache(
    file_name: str | Path, model: Model, return_metadata: bool = False
) -> list[LayerCache] | tuple[list[LayerCache], dict[str, str]]:
    """Read a cache that ``save_prompt_cache`` wrote.

    Raises FileFormatError when the file is damaged, of another format version, or does not fit ``model``.
    """
    path = Path(file_name)
    _, header = read_header(path)
    if header.get("format_version") != str(FORMAT_VERSION):
        found = header.get("format_version")
        raise FileFormatError(f"{path}: prompt cache format {found!r}; this version reads {FORMAT_VERSION}")
    arrays = load_tensors(path)
    try:
        layers = json.loads(header["layers"])
        cache = [_restore(i, layer, arrays) for i, layer in enumerate(layers)]
        user = json.loads(header["user"])
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{path}: damaged prompt cache ({error!r})") from None
    _check_fit(path, cache, model)
    mx.eval(list(arrays.values()))
    return (cache, user) if return_metadata else cache


def _restore(i: int, layer: dict[str, Any], arrays: Mapping[str, mx.array]) -> LayerCache:
    cls = _CLASSES[layer["class"]]
    state = [layer[field] if field in layer else arrays.get(f"{i}.{field}") for field in cls.FIELDS]
    return cls.from_state(state)


def _check_fit(path: Path, cache: Sequence[LayerCache], model: Model) -> None:
    """Compare with a cache of one token that the model itself fills."""
    probe = model.make_cache()
    model(mx.zeros((1, 1), dtype=mx.int32), cache=probe)
    fits = len(cache) == len(probe) and all(
        type(a) is type(b) and _shape(a) == _shape(b) for a, b in zip(cache, probe, strict=False)
    )
    if not fits:
        raise FileFormatError(f"{path}: this prompt cache was made by another model or in another dtype")


def _shape(cache: LayerCache) -> list[Any]:
    """What two caches of one model have in common, whatever their length."""
    out: list[Any] = []
    for field, value in zip(cache.FIELDS, cache.state, strict=True):
        if isinstance(value, mx.array) and field != "blocks":
            sequence_axis = 2 if field in ("keys", "values") else None
            out.append((field, value.dtype, tuple(n for axis, n in enumerate(value.shape) if axis != sequence_axis)))
        elif field in ("ratio", "lengths"):
            out.append((field, list(value) if field == "lengths" else value))
    return out
