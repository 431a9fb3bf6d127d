"""Recordings of routing as files: what is written is read, what is cut is readable, what is wrong is refused."""

from __future__ import annotations

import dataclasses
import json
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from mlx_moe.paging import trace as module
from mlx_moe.paging.moce import MoceConfig
from mlx_moe.paging.ranks import ranked
from mlx_moe.paging.trace import (
    MAGIC,
    LayerRouting,
    Pass,
    Ranked,
    Residency,
    Trace,
    TraceHeader,
    TraceWriter,
    read_trace,
)

EXPERTS, TOKENS = (12, 80), (1, 5, 9)
HEADER = TraceHeader("ab", EXPERTS, 3, True, 1, (100, 200), (4, 4), 64, 8, True, MoceConfig(0.5, 1, None))
START = Residency(((4, (3, 1)), (80, tuple(range(80)))))


def routing(rng: np.random.Generator, layer: int, rows: int, guess: bool) -> LayerRouting:
    def one() -> Ranked:
        return Ranked(*ranked(rng.standard_normal((rows, EXPERTS[layer])).astype(np.float32), 64))

    return LayerRouting(layer, one(), one() if guess else None)


def write(path: Path) -> tuple[list[Pass | Residency], list[int]]:
    """Events, and the size of the file after each."""
    rng, writer, events, sizes = np.random.default_rng(0), TraceWriter(path, HEADER), [START], []
    writer.residency(START)
    sizes.append(0)
    for i, rows in enumerate(TOKENS):
        layers = [routing(rng, 0, rows, False), routing(rng, 1, rows, i > 0)]
        for entry in [layers[:1], layers[1:]] if i else [layers]:  # in one frame, and in two
            writer.layers(entry)
        writer.commit(rows > 8, 1, rows, rows - (i == 1))
        events.append(Pass(rows > 8, 1, rows, rows - (i == 1), tuple(layers)))
        sizes.append(path.stat().st_size)
    writer.close()
    writer.close()
    return events, sizes


def same(a: object, b: object) -> bool:
    """Deeply, arrays too."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[bytes, list, list[int]]:
    path = tmp_path_factory.mktemp("trace") / "t"
    events, sizes = write(path)
    return path.read_bytes(), events, sizes


def read(tmp_path: Path, data: bytes) -> Trace:
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    return read_trace(path)


def test_what_is_written_is_read(tmp_path, written):
    data, events, _ = written
    found = read(tmp_path, data)
    assert found.header == HEADER and same(list(found.events), events) and not found.cut and not found.interrupted
    assert found.start == START and not HEADER.whole and dataclasses.replace(HEADER, kept=80).whole


def test_sixteen_bits_take_half_the_room(tmp_path):
    """Logits of a model in bfloat16 have 16 zero bits, which compress away."""
    rng, sizes = np.random.default_rng(0), []
    for mask in (0xFFFFFFFF, 0xFFFF0000):
        logits = (rng.standard_normal((500, 80)).astype(np.float32).view(np.uint32) & np.uint32(mask)).view(np.float32)
        writer = TraceWriter(tmp_path / "x", HEADER)
        writer.layers([LayerRouting(1, Ranked(*ranked(logits, 64)), None)])
        writer.close()
        sizes.append((tmp_path / "x").stat().st_size)
    assert sizes[1] < 0.65 * sizes[0] and sizes[1] < 500 * 64 * 4


def test_cut_anywhere(tmp_path, written):
    """Every length: refused while the header is not whole, else the passes whose last byte is there."""
    data, events, sizes = written
    head = len(MAGIC) + 4 + struct.unpack_from("<I", data, len(MAGIC))[0]
    for size in [*range(0, head + 40), *random.Random(0).sample(range(head, len(data)), 120), *sizes[1:]]:
        if size < head:
            with pytest.raises(ValueError, match="not a recording of routing"):
                read(tmp_path, data[:size])
            continue
        found = read(tmp_path, data[:size])
        whole = [event for event, end in zip(events[1:], sizes[1:], strict=True) if end <= size]
        assert same(found.passes, whole), size
        assert found.cut == (size not in (head, *sizes[1:])) or size < sizes[1], size


@pytest.mark.sample(40)
@pytest.mark.parametrize("seed", range(400))
def test_any_damage_is_refused_or_harmless(tmp_path, written, seed):
    """Bytes changed, cut out or put in: one line naming the file, or passes that were written."""
    data, events, _ = written
    rng, bad = random.Random(seed), bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, kind = rng.randrange(len(bad)), rng.random()
        if kind < 0.6:
            bad[at] ^= 1 << rng.randrange(8)
        elif kind < 0.8:
            del bad[at : at + rng.randint(1, 30)]
        else:
            bad[at:at] = rng.randbytes(rng.randint(1, 30))
    try:
        found = read(tmp_path, bytes(bad))
    except ValueError as error:
        assert "x.bin" in str(error) and "\n" not in str(error)
    else:
        assert all(any(same(event, real) for real in events[1:]) for event in found.passes)


def frame(kind: int, payload: bytes, crc: int | None = None) -> bytes:
    return struct.pack("<BII", kind, len(payload), zlib.crc32(payload) if crc is None else crc) + payload


def layer(number: int = 0, rows: int = 1, data: bytes | None = None, flags: int = 0) -> bytes:
    if data is None:
        data = bytes(48) + np.arange(12, dtype="<u2").tobytes() + bytes(4)
    return frame(1, struct.pack("<HHBI", 1, number, flags, rows) + zlib.compress(data))


def numbers(*values: int) -> bytes:
    return frame(3, zlib.compress(np.array(values, dtype="<u4").tobytes()))


COMMIT = frame(2, struct.pack("<BIII", 0, 1, 1, 1))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (frame(4, b""), "a frame of kind 4"),
        (struct.pack("<BII", 1, 1 << 29, 0), "a frame of kind 1 and 536870912 bytes"),
        (frame(2, bytes(13), crc=1), "a checksum is wrong"),
        (frame(2, b"abc"), "a commit of another size"),
        (layer() + frame(2, struct.pack("<BIII", 2, 1, 1, 1)), "a commit that fits no pass"),
        (layer() + frame(2, struct.pack("<BIII", 0, 1, 1, 2)), "a commit that fits no pass"),
        (layer() + frame(2, struct.pack("<BIII", 0, 1 << 31, 1 << 31, 2)), "a commit that fits no pass"),
        (layer() + frame(2, struct.pack("<BIII", 0, 1, 2, 2)), "another number of tokens"),
        (layer() + layer() + COMMIT, "a commit that fits no pass"),
        (layer(2), "a layer out of range"),
        (layer(0, 1 << 30), "a layer out of range"),
        (layer(0, 0), "a layer out of range"),
        (layer(0, flags=2), "a layer out of range"),
        (layer(0, 1 << 20), "layers of another size"),
        (layer(1, 1 << 20), "layers too large"),
        (layer(0, 1, bytes(100 << 20)), "layers of another size"),
        (layer(0, 1, bytes(12 * 6 + 4)), "ranks out of order"),
        (layer(0, 1, bytes(48) + np.full(12, 12, dtype="<u2").tobytes() + bytes(4)), "an expert that no layer has"),
        (layer(0, 1, np.arange(12, dtype="<f4").tobytes() + np.arange(12, dtype="<u2").tobytes() + bytes(4)),
         "ranks out of order"),
        (frame(1, b"ab"), "a layer is cut"),
        (frame(1, b"a"), "not a recording"),
        (frame(3, b"abc"), "not a recording"),
        (numbers(4, 1, 12, 4, 0), "an expert in memory that no layer has"),
        (numbers(4, 2, 3, 3, 4, 0), "a residency that fits no layer"),
        (numbers(13, 0, 4, 0), "a residency that fits no layer"),
        (numbers(2, 3, 0, 1, 2, 4, 0), "a residency that fits no layer"),
        (numbers(4, 4_000_000_000, 1), "a residency that fits no layer"),
        (numbers(4), "a residency that fits no layer"),
    ],
)  # fmt: skip
def test_hostile_frames(tmp_path, written, frames, reason, monkeypatch):
    """With checksums that are right."""
    data = written[0]
    head = len(MAGIC) + 4 + struct.unpack_from("<I", data, len(MAGIC))[0]
    with pytest.raises(ValueError, match=f"x.bin: not a recording of routing.*(?:{reason})|{reason}") as caught:
        read(tmp_path, data[:head] + frames)
    assert str(tmp_path) in str(caught.value)


def test_what_no_commit_ended_is_no_pass(tmp_path, written):
    data = written[0]
    head = len(MAGIC) + 4 + struct.unpack_from("<I", data, len(MAGIC))[0]
    found = read(tmp_path, data[:head] + layer() + numbers(4, 0, 80, 0) + layer() + COMMIT + layer())
    assert len(found.passes) == 1 and found.interrupted == 1 and found.cut


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "its version is not 1"),
        ({"top_k": 0}, "top_k"), ({"top_k": 13}, "top_k"), ({"top_k": True}, "top_k"), ({"top_k": None}, "top_k"),
        ({"experts": []}, "experts"), ({"experts": [1 << 16, 1]}, "experts"), ({"experts": 3}, "int"),
        ({"kept": 2}, "kept"), ({"window": 0}, "window"), ({"trunk": 3}, "trunk"), ({"normalize": 1}, "normalize"),
        ({"record_bytes": [1]}, "record_bytes"), ({"group_sizes": [1, -1]}, "group_sizes"),
        ({"moce": {"bonus": -1}}, "moce bonus"), ({"moce": {"x": 1}}, "x"), ({"moce": []}, "must be a mapping"),
        ({"more": 1}, "other fields"), ({"fingerprint": "x" * 200}, "fingerprint"),
    ],
)  # fmt: skip
def test_hostile_headers(tmp_path, written, change, reason):
    raw = {"version": 1} | json.loads(json.dumps(dataclasses.asdict(HEADER))) | change
    text = json.dumps(raw).encode()
    with pytest.raises(ValueError, match=f"x.bin: not a recording of routing.*{reason}"):
        read(tmp_path, MAGIC + struct.pack("<I", len(text)) + text)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{}", b"3", b"\xff", b"null"])
def test_headers_that_are_none(tmp_path, text):
    with pytest.raises(ValueError, match=r"x\.bin: not a recording"):
        read(tmp_path, MAGIC + struct.pack("<I", len(text)) + text)


def test_a_file_is_replaced_only_by_a_whole_header(tmp_path, monkeypatch):
    path = tmp_path / "t"
    path.write_text("before")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", fails)
    with pytest.raises(OSError, match="routing cannot be recorded there: No space left"):
        TraceWriter(path, HEADER)
    assert path.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["t"]
    with pytest.raises(OSError, match="nowhere"):
        TraceWriter(tmp_path / "nowhere" / "t", HEADER)
