"""Prompt caches on disk, as safetensors. (mlx-lm's own loader finds cache classes in its own module only.)"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_moe.cache import LayerCache, LinearCache, SparseCache
from mlx_moe.formats.checkpoint import atomic_path
from mlx_moe.formats.safetensors import FileFormatError, load_tensors, read_header
from mlx_moe.models.qwen4_exp import Model

FORMAT_VERSION = 1
MAX_ROWS = 1024
"""Sequences that one cache may hold: bounds what a damaged file can make the check allocate."""
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


def read_prompt_cache_metadata(file_name: str | Path) -> dict[str, str]:
    """The strings given to ``save_prompt_cache``, without reading the cache. Raises FileFormatError as loading does."""
    path = Path(file_name)
    with _damage_named(path):
        return {str(key): str(value) for key, value in json.loads(_header(path)["user"]).items()}


def load_prompt_cache(
    file_name: str | Path, model: Model, return_metadata: bool = False
) -> list[LayerCache] | tuple[list[LayerCache], dict[str, str]]:
    """Read a cache that ``save_prompt_cache`` wrote.

    Raises FileFormatError when the file is damaged, of another format version, or does not fit ``model``.
    """
    path = Path(file_name)
    user = read_prompt_cache_metadata(path)
    arrays = load_tensors(path)
    with _damage_named(path):
        layers = json.loads(_header(path)["layers"])
        states = [_state(i, layer, arrays) for i, layer in enumerate(layers)]
    _check_fit(path, states, model)
    cache = [_CLASSES[name].from_state(values) for name, values in states]
    mx.eval(list(arrays.values()))
    return (cache, user) if return_metadata else cache


def _header(path: Path) -> dict[str, str]:
    _, header = read_header(path)
    found = header.get("format_version")
    if found != str(FORMAT_VERSION):
        raise FileFormatError(f"{path}: prompt cache format {found!r}; this version reads {FORMAT_VERSION}")
    return header


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Whatever is wrong with the contents of a header becomes one line that names the file."""
    try:
        yield
    except FileFormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"{path}: damaged prompt cache ({str(error)[:80]!r})") from None


def _state(i: int, layer: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> tuple[str, list[Any]]:
    """(class, values of its fields) of one layer: numbers from the header, arrays from the file."""
    fields = _CLASSES[layer["class"]].FIELDS
    return layer["class"], [layer[field] if field in layer else arrays.get(f"{i}.{field}") for field in fields]


def _check_fit(path: Path, states: Sequence[tuple[str, list[Any]]], model: Model) -> None:
    """Compare with a cache of one token that the model itself fills, whatever the number of tokens."""
    probe = model.make_cache()
    model(mx.zeros((_rows(states), 1), dtype=mx.int32), cache=probe)
    tokens = states[0][1][0] if states else None  # "offset" is the first field of every class
    if type(tokens) is not int or not 0 < tokens < 1 << 31:
        raise FileFormatError(f"{path}: damaged prompt cache (it holds {str(tokens)[:40]} tokens)")
    found = [(name, [_described(value) for value in values]) for name, values in states]
    if found != [(type(layer).__name__, _expected(layer, tokens)) for layer in probe]:
        raise FileFormatError(f"{path}: this prompt cache was made by another model or in another dtype")


def _rows(states: Sequence[tuple[str, list[Any]]]) -> int:
    """Sequences in the cache, by its first array."""
    arrays = [value for _, values in states for value in values if isinstance(value, mx.array) and value.ndim > 1]
    return min(max(arrays[0].shape[0], 1), MAX_ROWS) if arrays else 1


def _expected(probe: LayerCache, tokens: int) -> list[Any]:
    """``_described`` fields of a layer that has seen ``tokens`` tokens, from one that has seen one."""
    values = dict(zip(probe.FIELDS, probe.state, strict=True))
    out = {field: _described(value) for field, value in values.items()}
    out["offset"] = _described(tokens)
    if isinstance(probe, SparseCache):
        for field in ("keys", "values"):
            B, heads, _, D = values[field].shape
            out[field] = (str(values[field].dtype), (B, heads, tokens, D))
        B, _, D = values["raw"].shape
        blocks = tokens // probe.ratio
        out["blocks"] = (str(values["raw"].dtype), (B, blocks, D)) if blocks else _described(None)
    return list(out.values())


def _described(value: Any) -> tuple[str, Any]:
    """Type and shape of an array, type and value of anything else."""
    if isinstance(value, mx.array):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return "list", [_described(item) for item in value]
    return type(value).__name__, value
