"""Writing one safetensors file of a pack from the front to the back, in steps that survive the process.

A file grows under ``NAME.tmp``. Now and then its bytes are forced to the disk and their number is noted in
``NAME.progress``; whoever opens the same file again goes on from there. When all bytes are there, the header with the
checksums is put in front and the file gets its name. So a file under its own name is always whole, and its bytes do not
depend on how often the work was stopped.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mlx_moe.formats.pack.layout import FORMAT_VERSION, LAYOUT, PAGE_BYTES, aligned

CHECKPOINT_BYTES = 128 << 20
CHECKPOINT_SECONDS = 20.0
_READ_BYTES = 8 << 20
_PIECE_BYTES = 256 << 10  # while they are in the cache: writes of 16 MB took three times as long
_ITEM_BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "U32": 4}
NO_CHECKSUM = "0" * 8
"""Stands in a header until the checksum is known."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a file will hold: name, safetensors' type, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def header(specs: Sequence[TensorSpec], metadata: Mapping[str, str], checksums: Sequence[str]) -> bytes:
    """The first bytes of a file, up to its first tensor: a multiple of 16 KiB, filled up with spaces."""
    entries, at = {}, 0
    for spec in specs:
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    names = [spec.name for spec in specs]
    own = {"format": "mlx", "format_version": str(FORMAT_VERSION), "layout": LAYOUT, **metadata}
    own["crc32"] = json.dumps(dict(zip(names, checksums, strict=True)))
    text = json.dumps({"__metadata__": own, **entries}, separators=(",", ":")).encode()
    size = aligned(8 + len(text), PAGE_BYTES)
    return (size - 8).to_bytes(8, "little") + text + b" " * (size - 8 - len(text))


class StreamedFile:
    """A file in the making; a context manager.

    Invariant: the first ``done`` bytes of data are in the temporary file and have gone through the checksums.
    """

    def __init__(
        self,
        path: Path,
        specs: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        cut: Callable[[int], int] = lambda done: 0,
    ):
        """Begin, or go on where an earlier process stopped.

        Args:
            path: the final name.
            specs: the tensors, in order.
            metadata: strings beside the pack's own.
            cut: the last place at or before a number of bytes of data from which the work can go on.
        """
        self._path, self._specs, self._metadata = path, tuple(specs), dict(metadata)
        self._temporary, self._progress = temporary_names(path)
        self._start = len(header(self._specs, self._metadata, [NO_CHECKSUM] * len(specs)))
        self._sums = [0] * len(specs)
        self._ends = [sum(spec.nbytes for spec in specs[: i + 1]) for i in range(len(specs))]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._noting: Future[None] | None = None
        self.done = 0
        self._file = os.open(self._temporary, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._recover(cut)
        except BaseException:
            self.__exit__()
            raise

    @property
    def total(self) -> int:
        """Bytes of data that the file will have."""
        return self._ends[-1] if self._ends else 0

    def append(self, data: memoryview) -> None:
        """Write the next bytes."""
        data = data.cast("B")
        if self.done + len(data) > self.total:
            raise ValueError(f"{self._path.name}: {self.done + len(data)} bytes of {self.total}")
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            self._sum(piece, self.done)
            _write(self._file, piece, self._start + self.done)
            self.done += len(piece)
        if self.done - self._noted >= CHECKPOINT_BYTES or time.monotonic() - self._noted_at >= CHECKPOINT_SECONDS:
            self._checkpoint()

    def finish(self) -> None:
        """Put the header in front and give the file its name."""
        if self.done != self.total:
            raise ValueError(f"{self._path.name}: ends after {self.done} of {self.total} bytes")
        self._wait()
        sums = [checksum_text(value) for value in self._sums]
        _write(self._file, memoryview(header(self._specs, self._metadata, sums)), 0)
        os.fsync(self._file)
        self._temporary.replace(self._path)
        sync_folder(self._path.parent)
        self._progress.unlink(missing_ok=True)

    def __enter__(self) -> StreamedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        os.close(self._file)

    def _recover(self, cut: Callable[[int], int]) -> None:
        """Take over what an earlier process has written, as far as it is known to be whole."""
        known = _noted_bytes(self._progress)
        there = os.fstat(self._file).st_size - self._start
        goal = cut(min(known, self.total)) if there >= known else 0
        os.ftruncate(self._file, self._start + goal)
        while self.done < goal:
            data = os.pread(self._file, min(_READ_BYTES, goal - self.done), self._start + self.done)
            self._sum(memoryview(data), self.done)
            self.done += len(data)
        self._noted, self._noted_at = self.done, time.monotonic()

    def _checkpoint(self) -> None:
        """Force what is there to the disk and note it, while the work goes on."""
        self._wait()
        self._noted, self._noted_at = self.done, time.monotonic()
        self._noting = self._pool.submit(self._note, self.done)

    def _note(self, done: int) -> None:
        os.fsync(self._file)
        write_synced(self._progress, json.dumps({"bytes": done}))

    def _wait(self) -> None:
        if self._noting is not None:
            self._noting.result()
            self._noting = None

    def _sum(self, data: memoryview, at: int) -> None:
        """Data from byte ``at`` on, each tensor's share to its own checksum."""
        for i, end in enumerate(self._ends):
            if at < end and len(data):
                share = min(len(data), end - at)
                self._sums[i] = zlib.crc32(data[:share], self._sums[i])
                data, at = data[share:], at + share


def checksum_text(value: int) -> str:
    """A CRC-32 as it stands in the metadata."""
    return f"{value:08x}"


def temporary_names(path: Path) -> tuple[Path, Path]:
    """What a file is called while it grows, and where its progress is noted."""
    return path.with_name(path.name + ".tmp"), path.with_name(path.name + ".progress")


def write_synced(path: Path, text: str) -> None:
    """A small file that is on the disk, whole, before it has its name."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(file: int, data: memoryview, at: int) -> None:
    while len(data):
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


def _noted_bytes(progress: Path) -> int:
    try:
        value = json.loads(progress.read_text(encoding="utf-8"))["bytes"]
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError):
        return 0
    return value if type(value) is int and value > 0 else 0
