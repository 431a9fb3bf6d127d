"""A model folder's weight files: which there are, what they hold, and writing them."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_moe.formats.safetensors import FileFormatError, load_tensors

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 << 30


@dataclass(frozen=True)
class Checkpoint:
    """Tensors of a folder by their names in the files, and the file of each."""

    folder: Path
    tensors: dict[str, mx.array]
    files: dict[str, str]


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """All tensors of a folder, lazily.

    Raises FileFormatError naming the file that is missing, truncated, corrupt, or holds a name for the second time.
    """
    folder = Path(folder)
    tensors: dict[str, mx.array] = {}
    files: dict[str, str] = {}
    for path in weight_files(folder):
        for name, tensor in load_tensors(path).items():
            if name in tensors:
                raise FileFormatError(f"{path}: tensor {name!r} is also in {files[name]}")
            tensors[name], files[name] = tensor, path.name
    return Checkpoint(folder, tensors, files)


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder: those that its index names, else all; FileFormatError when one is missing."""
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FileFormatError(f"{index}: not a weight index ({error!r})") from None
        if bad := [name for name in names if not _is_file_name(name)]:
            raise FileFormatError(f"{index}: names {str(bad[0])[:80]!r}, which is not a file of this folder")
        paths = [folder / name for name in names]
    else:  # hidden files are macOS's ._name companions and what a killed write left
        paths = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if not paths:
        raise FileFormatError(f"{folder}: holds no .safetensors files")
    if missing := [path.name for path in paths if not path.exists()]:
        raise FileFormatError(
            f"{folder}: {len(missing)} weight file(s) missing, first {missing[0]!r}; download them again"
        )
    return paths


def _is_file_name(name: Any) -> bool:
    """Whether an entry of the index names a file of the folder itself."""
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name and len(name) < 256


def write_checkpoint(folder: str | Path, tensors: Mapping[str, mx.array], config: Mapping[str, Any]) -> None:
    """Write tensors as ``model*.safetensors``, their index and ``config.json``.

    Every file appears whole or not at all: it is written under a temporary name first. config.json comes last. The
    index makes files of an earlier save in the same folder invisible, even where there is one new file only.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(tensors)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for i in range(len(shards))
    ]
    for name, shard in zip(names, shards, strict=True):
        with atomic_path(folder / name) as temporary:
            mx.save_safetensors(str(temporary), shard, metadata={"format": "mlx"})
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    write_json(folder / "config.json", dict(sorted(config.items())))


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """A temporary name beside ``target``, renamed to it on success and removed on failure."""
    # MLX appends .safetensors to a name that does not end so, and would write beside the temporary file.
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".safetensors")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that appears whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, mx.array]) -> list[dict[str, mx.array]]:
    shards: list[dict[str, mx.array]] = [{}]
    room = SHARD_BYTES
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards
