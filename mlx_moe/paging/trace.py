"""Files of recorded routing: what a model's routers said, pass by pass, and what stood in memory at the start.

A file is a magic line, a header in JSON, and frames: kind (1 byte), length and CRC-32 of the payload (4 bytes each,
little-endian as everything here), payload. Frames of a pass are its layers, then its commit; a pass without a commit
never happened, so a file that ends anywhere is readable up to its last whole pass. A residency frame says what stands
in memory before the next pass: at the start, after a change of slots, after an interruption.

Of every token the ``kept`` best experts are there, ids as uint16 and logits as float32 exactly as the router gave them,
and the sum of exp over all experts. With no more experts than that, all of the routing is there. Knows no MLX.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mlx_moe.paging.moce import MoceConfig
from mlx_moe.paging.ranks import best_first

MAGIC = b"mlx-moe routing\n"
VERSION = 1
EVICTIONS = ("lru", "frequency")
KEPT = 64
"""Ranks of a token that are recorded."""
MOST_HEADER_BYTES, MOST_FRAME_BYTES = 4 << 20, 1 << 28
MOST_ROWS, MOST_LAYERS, MOST_EXPERTS = 1 << 20, 1 << 12, 0xFFFF
_FRAME, _COUNT, _LAYER, _COMMIT = (struct.Struct(form) for form in ("<BII", "<H", "<HBI", "<BIII"))
_LAYERS_KIND, _COMMIT_KIND, _RESIDENCY_KIND = 1, 2, 3


class Ranked(NamedTuple):
    """Of T tokens, the best experts: ids [T, M] uint16 and logits [T, M] float32 by rank; total [T] float32, the
    logarithm of the sum of exp over all experts."""

    ids: np.ndarray
    logits: np.ndarray
    total: np.ndarray


class LayerRouting(NamedTuple):
    """A layer in a pass: what its router said, and what it said one layer early for the read-ahead, if it was asked."""

    layer: int
    routed: Ranked
    guess: Ranked | None


@dataclass(frozen=True)
class Pass:
    """One pass over [batch, tokens], whose first ``accepted`` tokens were kept; its layers in order."""

    prompt: bool
    batch: int
    tokens: int
    accepted: int
    layers: tuple[LayerRouting, ...]


@dataclass(frozen=True)
class Residency:
    """What stands in memory before the next pass: (slots, experts with the oldest first) by layer."""

    layers: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class TraceHeader:
    """What a recording is of.

    Attributes:
        fingerprint: of the routers' weights, in hexadecimal.
        experts: by layer, the draft layer's last.
        top_k, normalize: as the model routes.
        trunk: layers without the draft layer.
        record_bytes: of one expert by layer; 0 where experts do not stream.
        group_sizes: experts by layer that a prompt runs through at once; 0 likewise.
        kept: ranks of a token that are recorded.
        window: rows that are routed at once where a pass is no prompt.
        read_ahead, moce: as the model was run.
        eviction: who leaves memory, "lru" or "frequency" (usage.LayerUsage).
        start_counts: for frequency, what its long memory began with, [layers][experts]; None is nothing.
    """

    fingerprint: str
    experts: tuple[int, ...]
    top_k: int
    normalize: bool
    trunk: int
    record_bytes: tuple[int, ...]
    group_sizes: tuple[int, ...]
    kept: int
    window: int
    read_ahead: bool
    moce: MoceConfig | None
    eviction: str = "lru"
    start_counts: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        layers = len(self.experts)
        _need(isinstance(self.fingerprint, str) and len(self.fingerprint) <= 128, "fingerprint")
        _need(1 <= layers <= MOST_LAYERS and all(_within(e, 1, MOST_EXPERTS) for e in self.experts), "experts")
        _need(_within(self.top_k, 1, min(self.experts)), "top_k")
        _need(_within(self.kept, self.top_k, MOST_EXPERTS), "kept")
        _need(_within(self.window, 1, MOST_ROWS), "window")
        _need(_within(self.trunk, 0, layers), "trunk")
        _need(isinstance(self.normalize, bool) and isinstance(self.read_ahead, bool), "normalize or read_ahead")
        _need(self.eviction in EVICTIONS, "eviction")
        if self.start_counts is not None:
            fits = [len(row) for row in self.start_counts] == list(self.experts)
            _need(fits and all(_count(value) for row in self.start_counts for value in row), "start_counts")
        for name in ("record_bytes", "group_sizes"):
            values = getattr(self, name)
            _need(len(values) == layers and all(_within(value, 0, 1 << 40) for value in values), name)

    @property
    def whole(self) -> bool:
        """Whether every rank is recorded."""
        return self.kept >= max(self.experts)

    def ranks(self, layer: int) -> int:
        """Recorded of a token in a layer."""
        return min(self.kept, self.experts[layer])


def _count(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < math.inf


class TraceWriter:
    """Writes a recording while it is made; what it holds in memory is one frame."""

    def __init__(self, path: str | Path, header: TraceHeader) -> None:
        """Start the file; one of that name is replaced once the header is on disk. Raises OSError naming the file."""
        self._path, self._header = Path(path), header
        part = self._path.with_name(self._path.name + ".part")
        text = json.dumps({"version": VERSION} | asdict(header)).encode()
        try:
            self._file: BinaryIO = open(part, "wb")  # noqa: SIM115  it stays open; what follows are whole frames
            self._file.write(MAGIC + struct.pack("<I", len(text)) + text)
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(part, self._path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise OSError(error.errno, f"routing cannot be recorded there: {error.strerror}", str(path)) from None

    def layers(self, found: Sequence[LayerRouting]) -> None:
        """Layers of the pass that ``commit`` will end."""
        heads = [_LAYER.pack(e.layer, e.guess is not None, len(e.routed.total)) for e in found]
        parts = [part for e in found for one in (e.routed, e.guess) if one is not None for part in _planes(one)]
        self._frame(_LAYERS_KIND, _COUNT.pack(len(found)) + b"".join(heads) + zlib.compress(b"".join(parts), 1))

    def commit(self, prompt: bool, batch: int, tokens: int, accepted: int) -> None:
        """The pass is whole; it is handed to the system at once."""
        self._frame(_COMMIT_KIND, _COMMIT.pack(prompt, batch, tokens, accepted))
        self._file.flush()

    def residency(self, found: Residency) -> None:
        """What stands in memory now; layers that were written since the last commit are no pass."""
        numbers = [value for slots, experts in found.layers for value in (slots, len(experts), *experts)]
        self._frame(_RESIDENCY_KIND, zlib.compress(np.array(numbers, dtype="<u4").tobytes(), 1))

    def close(self) -> None:
        """End the file; may be called again."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def _frame(self, kind: int, payload: bytes) -> None:
        try:
            self._file.write(_FRAME.pack(kind, len(payload), zlib.crc32(payload)) + payload)
        except OSError as error:
            raise OSError(error.errno, f"routing cannot be recorded: {error.strerror}", str(self._path)) from None


@dataclass(frozen=True)
class Trace:
    """A recording in memory. ``interrupted`` passes were begun and given up; ``cut`` says that the file ends early."""

    header: TraceHeader
    events: tuple[Pass | Residency, ...]
    interrupted: int = 0
    cut: bool = False

    @property
    def passes(self) -> list[Pass]:
        """In order."""
        return [event for event in self.events if isinstance(event, Pass)]

    @property
    def start(self) -> Residency | None:
        """What stood in memory before the first pass."""
        return next((event for event in self.events if isinstance(event, Residency)), None)


def read_trace(path: str | Path) -> Trace:
    """A recording, up to its last whole pass. Raises ValueError, naming file and reason, for anything else; OSError."""
    try:
        with open(path, "rb") as file:
            header = _header(file)
            return _gather(file, header)
    except (_Bad, zlib.error) as error:
        raise ValueError(f"{path}: not a recording of routing ({error})") from None


class _Bad(Exception):
    """Why a file is refused."""


def _need(true: bool, what: str) -> None:
    if not true:
        raise ValueError(f"{what} of the recording is out of range")


def _within(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _header(file: BinaryIO) -> TraceHeader:
    if file.read(len(MAGIC)) != MAGIC:
        raise _Bad("it does not start like one")
    (size,) = struct.unpack("<I", file.read(4).ljust(4, b"\0"))
    text = file.read(size) if size <= MOST_HEADER_BYTES else b""
    if not size or len(text) < size:
        raise _Bad("its header is cut or too long")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raise _Bad("its header is not JSON") from None
    if not isinstance(raw, dict) or raw.pop("version", None) != VERSION:
        raise _Bad(f"its version is not {VERSION}")
    if set(raw) != {field.name for field in fields(TraceHeader)}:
        raise _Bad("its header has other fields")
    try:
        moce = raw["moce"] if raw["moce"] is None else MoceConfig(**raw["moce"])
        lists = {name: tuple(raw[name]) for name in ("experts", "record_bytes", "group_sizes")}
        counts = raw["start_counts"]
        counts = counts if counts is None else tuple(tuple(row) for row in counts)
        return TraceHeader(**raw | lists | {"moce": moce, "start_counts": counts})
    except (ValueError, TypeError) as error:
        raise _Bad(str(error)) from None


def _frames(file: BinaryIO) -> Iterator[tuple[int, bytes] | None]:
    """Kind and payload; None where the file ends within a frame."""
    while head := file.read(_FRAME.size):
        if len(head) < _FRAME.size:
            yield None
            return
        kind, size, crc = _FRAME.unpack(head)
        if kind not in (_LAYERS_KIND, _COMMIT_KIND, _RESIDENCY_KIND) or size > MOST_FRAME_BYTES:
            raise _Bad(f"a frame of kind {kind} and {size} bytes")
        payload = file.read(size)
        if len(payload) < size:
            yield None
            return
        if zlib.crc32(payload) != crc:
            raise _Bad("a checksum is wrong")
        yield kind, payload


def _gather(file: BinaryIO, header: TraceHeader) -> Trace:
    events: list[Pass | Residency] = []
    layers: list[LayerRouting] = []
    interrupted, cut = 0, False
    for frame in _frames(file):
        if frame is None:
            cut = True
        elif frame[0] == _LAYERS_KIND:
            layers += _layers(frame[1], header)
        elif frame[0] == _RESIDENCY_KIND:
            events.append(_residency(frame[1], header))
            interrupted += bool(layers)
            layers = []
        else:
            events.append(_pass(frame[1], layers))
            layers = []
    return Trace(header, tuple(events), interrupted, cut or bool(layers))


def _pass(payload: bytes, layers: Sequence[LayerRouting]) -> Pass:
    if len(payload) != _COMMIT.size:
        raise _Bad("a commit of another size")
    prompt, batch, tokens, accepted = _COMMIT.unpack(payload)
    rows = batch * tokens
    names = [entry.layer for entry in layers]
    if prompt > 1 or not 1 <= rows <= MOST_ROWS or accepted > tokens or names != sorted(set(names)):
        raise _Bad("a commit that fits no pass")
    if any(len(entry.routed.total) != rows for entry in layers):
        raise _Bad("a layer of another number of tokens than its pass")
    return Pass(bool(prompt), batch, tokens, accepted, tuple(layers))


def _residency(payload: bytes, header: TraceHeader) -> Residency:
    most = 4 * sum(2 + experts for experts in header.experts)
    data = _unpacked(payload, most)
    numbers, at, layers = np.frombuffer(data[: len(data) // 4 * 4], dtype="<u4").tolist(), 0, []
    for experts in header.experts:
        slots, count = numbers[at : at + 2] if at + 2 <= len(numbers) else (0, 0)
        found = numbers[at + 2 : at + 2 + count]
        if not 1 <= slots <= experts or not len(found) == count <= slots or len(set(found)) < count:
            raise _Bad("a residency that fits no layer")
        if found and max(found) >= experts:
            raise _Bad("an expert in memory that no layer has")
        layers.append((slots, tuple(found)))
        at += 2 + count
    return Residency(tuple(layers))


def _layers(payload: bytes, header: TraceHeader) -> Iterator[LayerRouting]:
    """A count, as many heads, and the numbers of all layers in one stream."""
    (count,) = _COUNT.unpack(payload[: _COUNT.size].ljust(_COUNT.size, b"\0"))
    start = _COUNT.size + count * _LAYER.size
    if start > len(payload):
        raise _Bad("a layer is cut")
    heads = [_LAYER.unpack_from(payload, at) for at in range(_COUNT.size, start, _LAYER.size)]
    for layer, flags, rows in heads:
        if layer >= len(header.experts) or flags > 1 or not 1 <= rows <= MOST_ROWS:
            raise _Bad("a layer out of range")
    sizes = [rows * (6 * header.ranks(layer) + 4) for layer, _, rows in heads]  # of one router's word
    total = sum(one * (1 + flags) for one, (_, flags, _) in zip(sizes, heads, strict=True))
    if total > MOST_FRAME_BYTES:
        raise _Bad("layers too large")
    data, at = _unpacked(payload[start:], total), 0
    if len(data) != total:
        raise _Bad("layers of another size")
    for one, (layer, flags, rows) in zip(sizes, heads, strict=True):
        words = [data[at + i * one : at + (i + 1) * one] for i in range(1 + flags)]
        found = [_ranked(word, rows, header.ranks(layer), header.experts[layer]) for word in words]
        yield LayerRouting(layer, found[0], found[1] if flags else None)
        at += one * (1 + flags)


def _unpacked(packed: bytes, most: int) -> bytes:
    """At most so many bytes, and one more where there are more."""
    return zlib.decompressobj().decompress(packed, most + 1)


def _planes(found: Ranked) -> tuple[bytes, ...]:
    """Bytes of the same weight together: of 16-bit models half of them are zeros, which compress."""
    values = np.ascontiguousarray(found.logits, dtype="<f4")
    planes = np.ascontiguousarray(values.reshape(-1).view(np.uint8).reshape(-1, 4).T)
    return planes.tobytes(), found.ids.astype("<u2").tobytes(), found.total.astype("<f4").tobytes()


def _ranked(data: bytes, rows: int, ranks: int, experts: int) -> Ranked:
    count = rows * ranks
    planes = np.frombuffer(data, dtype=np.uint8, count=4 * count).reshape(4, count)
    logits = np.ascontiguousarray(planes.T).view("<f4").astype(np.float32).reshape(rows, ranks)
    ids = np.frombuffer(data, dtype="<u2", count=count, offset=4 * count).astype(np.uint16).reshape(rows, ranks)
    total = np.frombuffer(data, dtype="<f4", count=rows, offset=6 * count).astype(np.float32)
    if ids.max() >= experts:
        raise _Bad("an expert that no layer has")
    values = best_first(logits) - np.arange(ranks)  # without the place: equal logits have equal keys
    falling = (values[:, 1:] > values[:, :-1]) | ((values[:, 1:] == values[:, :-1]) & (ids[:, 1:] > ids[:, :-1]))
    if not falling.all() or (np.diff(np.sort(ids, axis=1)) == 0).any():
        raise _Bad("ranks out of order")
    return Ranked(ids, logits, total)
