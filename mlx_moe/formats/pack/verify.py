"""Reading a pack again, all of it, to compare every checksum."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

from mlx_moe.formats.pack.reader import Pack, PackFile
from mlx_moe.formats.pack.writer import checksum_text
from mlx_moe.formats.safetensors import FileFormatError

_READ_BYTES = 8 << 20


def verify_pack(pack: Pack, progress: Callable[[int], None] = lambda count: None) -> int:
    """Compare every tensor with its checksum, and find the n-gram table where it was left.

    Args:
        progress: called with the number of bytes read since the last call.

    Returns:
        How many tensors were compared.

    Raises FileFormatError naming the first file and tensor that differ.
    """
    _ = pack.rows
    return sum(_verify_file(file, progress) for file in pack.files)


def _verify_file(file: PackFile, progress: Callable[[int], None]) -> int:
    sums = file.described("crc32")
    for name, info in file.tensors.items():
        if sums.get(name) != _checksum(file.path, info.start, info.stop, progress):
            what = "is not what was written" if name in sums else "has no checksum"
            raise FileFormatError(f"{file.path}: tensor {name[:120]!r} {what}; convert or copy it again")
    return len(file.tensors)


def _checksum(path: Path, start: int, stop: int, progress: Callable[[int], None]) -> str:
    value = 0
    with path.open("rb") as file:
        file.seek(start)
        while start < stop and (data := file.read(min(_READ_BYTES, stop - start))):
            value = zlib.crc32(data, value)
            progress(len(data))
            start += len(data)
    return checksum_text(value)
