"""Which files make one model: from one of its files, from a folder, or from a list; in any order, under any names.

A model in several files says so in the metadata of each (``split.no`` from 0, ``split.count``,
``split.tensors.count``), and its files are usually called NAME-00001-of-00003.gguf. The metadata decides; names only
save reading other files. Files that were not named one by one may be links, but only to where the model may be: its own
folder, or the blobs of the Hub's cache that the folder belongs to.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_moe.formats.gguf.header import Header, read_header
from mlx_moe.formats.safetensors import FileFormatError

MAX_SHARDS = 9999
_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class _Split:
    """What a file says of its place in the model; total counts the tensors of all shards."""

    number: int
    count: int
    total: int


def read_shards(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Header]:
    """The headers of all files of one model, in the order of their numbers.

    Args:
        source: one of the model's files, whose others are looked for beside it; a folder that holds one model; or the
            list of all its files.

    Raises FileFormatError, in one line, naming the file that is missing, double, damaged or of another model.
    """
    if not isinstance(source, (str, os.PathLike)):
        return _complete([read_header(path) for path in source])
    path = Path(source)
    return _of_folder(path) if path.is_dir() else _of_file(path)


def neighbours(path: Path) -> list[Header]:
    """The headers of the other GGUF files beside one, of those that can be read."""
    others = (other for other in _files(path.parent) if other.name != path.name)
    return _readable(others, _roots(path))[0]


def _of_file(path: Path) -> list[Header]:
    first = read_header(path)
    split = _split(first)
    if split.count == 1:
        return [first]
    names = _sibling_names(path, split.count)
    roots = _roots(path)
    if names and all((path.parent / name).exists() for name in names):
        others = [read_header(_checked(path.parent / name, roots)) for name in names if name != path.name]
        return _complete([first, *others])
    others, problem = _readable((other for other in _files(path.parent) if other.name != path.name), roots)
    family = [other for other in others if _family(other) == _family(first)]
    return _complete([first, *family], names, problem)


def _of_folder(folder: Path) -> list[Header]:
    headers, problem = _readable(_files(folder), [folder.resolve(), *_blobs(folder)])
    families: dict[tuple[int, int] | Path, list[Header]] = defaultdict(list)
    for header in headers:
        count, total = _family(header)
        families[(count, total) if count > 1 else header.path].append(header)
    models = [family for family in families.values() if _is_model(family)]
    if len(models) > 1:
        names = ", ".join(family[0].path.name for family in models[:4])
        raise FileFormatError(f"{folder}: holds {len(models)} GGUF models ({names}); name a file of one")
    if not models:
        raise problem or FileFormatError(f"{folder}: holds no GGUF model; name a .gguf file")
    family = models[0]
    return _complete(family, _sibling_names(family[0].path, _split(family[0]).count), problem)


def _is_model(family: Sequence[Header]) -> bool:
    """Not a vision projector, an importance matrix, or the draft layer alone, which may lie beside the model."""
    kinds = {header.metadata.get("general.type", "model") for header in family}
    several = _split(family[0]).count > 1  # perhaps incomplete
    first = any(name.startswith("blk.0.") for header in family for name in header.tensors)
    return kinds == {"model"} and (several or first)


def _split(header: Header) -> _Split:
    values = {}
    for field, low, high in (("count", 1, MAX_SHARDS), ("no", 0, MAX_SHARDS - 1), ("tensors.count", 0, 1 << 31)):
        value = header.metadata.get(f"split.{field}", low)
        if type(value) is int and field == "count" and value == 0:
            value = 1  # a file made by splitting, then merged again
        if type(value) is not int or not low <= value <= high:
            shown = str(value)[:40]
            raise FileFormatError(f"{header.path}: split.{field} is {shown}; allowed: {low} to {high}, split it again")
        values[field] = value
    if values["no"] >= values["count"]:
        raise FileFormatError(f"{header.path}: is shard {values['no'] + 1} of {values['count']}; split it again")
    return _Split(values["no"], values["count"], values["tensors.count"])


def _family(header: Header) -> tuple[int, int]:
    """Equal for the shards of one model: how many there are, and how many tensors they hold together."""
    split = _split(header)
    return split.count, split.total


def _complete(
    headers: Sequence[Header], names: Sequence[str] = (), problem: FileFormatError | None = None
) -> list[Header]:
    """The headers in order, when they are exactly the shards of one model.

    ``names`` are what the shards should be called, ``problem`` what kept a file from being considered.
    """
    if not headers:
        raise FileFormatError("no GGUF file was named; give the model's files or its folder")
    want = _split(headers[0])
    shards: dict[int, Header] = {}
    for header in headers:
        split = _split(header)
        if split.count != want.count or split.total != want.total:
            raise FileFormatError(f"{header.path}: is of another model than {headers[0].path}; name the files of one")
        if split.number in shards:
            twice = f"{shards[split.number].path} and {header.path} are both shard {split.number + 1} of {want.count}"
            raise FileFormatError(f"{twice}; name the files of one model")
        shards[split.number] = header
    for number in range(want.count):
        if number not in shards:
            raise _missing(headers[0].path, number, want.count, names, problem)
    found = sum(len(header.tensors) for header in headers)
    if want.total not in (0, found):
        raise FileFormatError(
            f"{headers[0].path}: its shards hold {found} of {want.total} tensors; download them again"
        )
    return [shards[number] for number in range(want.count)]


def _missing(
    path: Path, number: int, count: int, names: Sequence[str], problem: FileFormatError | None
) -> FileFormatError:
    name = f" ({names[number]})" if names else ""
    why = f" [{problem}]" if problem else ""
    return FileFormatError(f"{path}: shard {number + 1} of {count}{name} is missing; put it into the same folder{why}")


def _sibling_names(path: Path, count: int) -> list[str]:
    """What all shards are called if ``path`` follows the naming; else nothing."""
    match = _NAME.fullmatch(path.name)
    if not match or int(match[3]) != count:
        return []
    return [f"{match[1]}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def _files(folder: Path) -> list[Path]:
    """The GGUF files of a folder; hidden ones are macOS's ._name companions and unfinished downloads."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".gguf" and not path.name.startswith("."))
    except OSError as error:
        raise FileFormatError(f"{folder}: cannot be listed ({error.strerror or error}); name a .gguf file") from None


def _readable(paths: Iterable[Path], roots: Sequence[Path]) -> tuple[list[Header], FileFormatError | None]:
    """Headers of the files that have a good one, and the first error of the others."""
    headers, problem = [], None
    for path in paths:
        try:
            header = read_header(_checked(path, roots))
            _split(header)
            headers.append(header)
        except FileFormatError as error:
            problem = problem or error
    return headers, problem


def _checked(path: Path, roots: Sequence[Path]) -> Path:
    """The path itself, if what it leads to lies under one of the roots."""
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links
        raise FileFormatError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'a circle'})") from None
    if not any(target.is_relative_to(root) for root in roots):
        raise FileFormatError(f"{path}: leads to {target}, out of the model's folder; name the files one by one")
    return path


def _roots(path: Path) -> list[Path]:
    """Where the other shards of a named file may lie: in its folder, in the folder of what it leads to, in blobs."""
    return [path.parent.resolve(), path.resolve().parent, *_blobs(path.parent)]


def _blobs(folder: Path) -> list[Path]:
    """The blobs folder of the Hub cache that has ``folder`` in one of its snapshots."""
    parents = [folder.resolve(), *folder.resolve().parents]
    return [parent.parent / "blobs" for parent in parents if parent.name == "snapshots"][:1]
