"""Headers of safetensors files: what is whole is read, and everything else is refused by the name of the file."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_moe.formats.safetensors import MAX_HEADER_BYTES, FileFormatError, TensorInfo, load_tensors, read_header

FUZZ = 3000
HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "empty": {"dtype": "F32", "shape": [0, 7], "data_offsets": [32, 32]},
    "scalar": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
    "__metadata__": {"format": "pt"},
}
DATA = bytes(range(40))


def encode(header: Any, data: bytes = DATA, length: int | None = None) -> bytes:
    """A file of a header (an object or its text) and data; ``length`` overrides the header's length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def changed(name: str, **entry: Any) -> dict[str, Any]:
    return {**HEADER, name: {**HEADER[name], **entry}}


def put(path: Path, content: bytes) -> None:
    """Write a new file; writing over an old one is much slower on journalling file systems."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def refusal(path: Path, content: bytes) -> str:
    """The message with which a file is refused, by both readers."""
    put(path, content)
    messages = []
    for read in (read_header, load_tensors):
        with pytest.raises(FileFormatError) as caught:
            read(path)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert str(path) in messages[0], "the file is not named"
    assert "\n" not in messages[0], "not one line"
    assert len(messages[0]) < len(str(path)) + 400, f"too long: {messages[0][:200]}"
    return messages[0]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model-00007.safetensors"


def test_a_whole_file(path):
    path.write_bytes(encode(HEADER))
    tensors, metadata = read_header(path)
    base = len(encode(HEADER)) - len(DATA)
    assert tensors["a"] == TensorInfo("F32", (2, 3), base, base + 24)
    assert tensors["scalar"] == TensorInfo("I64", (), base + 32, base + 40)
    assert tensors["empty"].start == tensors["empty"].stop
    assert metadata == {"format": "pt"}
    loaded = load_tensors(path)
    assert set(loaded) == {"a", "b", "empty", "scalar"}
    assert np.array(loaded["a"]).tobytes() == DATA[:24]
    assert loaded["empty"].shape == (0, 7)
    assert loaded["scalar"].item() == int.from_bytes(DATA[32:], "little")


def test_what_mlx_writes(path):
    arrays = {str(dtype): mx.ones((3, 2)).astype(dtype) for dtype in (mx.float16, mx.bfloat16, mx.float32, mx.int64)}
    arrays |= {str(dtype): mx.ones((5,)).astype(dtype) for dtype in (mx.uint8, mx.uint32, mx.bool_, mx.int8, mx.uint16)}
    mx.save_safetensors(str(path), arrays, {"format": "mlx"})
    tensors, metadata = read_header(path)
    assert metadata == {"format": "mlx"}
    assert {name: info.shape for name, info in tensors.items()} == {name: a.shape for name, a in arrays.items()}
    for name, array in load_tensors(path).items():
        assert array.dtype == arrays[name].dtype
        assert mx.array_equal(array, arrays[name]).item(), name


def test_fp8_comes_as_bytes(path):
    path.write_bytes(encode({"w": {"dtype": "F8_E4M3", "shape": [2, 4], "data_offsets": [0, 8]}}, DATA[:8]))
    assert load_tensors(path)["w"].dtype == mx.uint8
    assert np.array(load_tensors(path)["w"]).tobytes() == DATA[:8]


def test_no_tensors_and_padded_header(path):
    path.write_bytes(encode(b"{}     ", b""))
    assert read_header(path) == ({}, {})
    assert load_tensors(path) == {}


def test_missing_file_and_folder(path):
    for read in (read_header, load_tensors):
        with pytest.raises(FileFormatError, match=r"model-00007.*cannot be read"):
            read(path)
    path.mkdir()
    with pytest.raises(FileFormatError, match=r"model-00007.*cannot be read"):
        read_header(path)


def test_truncated_at_every_byte(path):
    whole = encode(HEADER)
    for size in range(len(whole)):
        message = refusal(path, whole[:size])
        assert "truncated" in message or "ends after" in message, f"cut at {size}: {message}"


def test_bytes_after_the_end(path):
    for extra in (b"\0", b"\0" * 4096):
        assert f"{len(extra)} bytes after the last tensor" in refusal(path, encode(HEADER) + extra)


@pytest.mark.parametrize(
    "length", [0, 1, 7, 10**6, MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]
)
def test_hostile_header_length(path, length):
    message = refusal(path, encode(HEADER, length=length))
    assert "header" in message


def test_header_length_that_takes_in_the_data(path):
    whole = encode(HEADER)
    refusal(path, encode(HEADER, length=len(whole) - 8))
    refusal(path, encode(HEADER, length=len(whole) - 7))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'"a"',
        b"NaN",
        b"{'a': 1}",
        b'{"a": 1,}',
        b"\xff\xfe\xfd",
        b'{"\xff": 1}',
        b"\0" * 64,
        b"PK\x03\x04" + b"\0" * 60,
        b"version https://git-lfs.github.com/spec/v1\n",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda text: f"{len(text)} bytes {text[:12]!r}",
)
def test_header_that_is_not_an_object(path, text):
    assert "header is not" in refusal(path, encode(text, b""))


def test_a_pointer_file_of_git_lfs(path):
    refusal(path, b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5000000000\n")


def test_duplicate_names(path):
    entry = b'{"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'
    assert "stands twice" in refusal(path, encode(b'{"a": ' + entry + b', "a": ' + entry + b"}", DATA[:4]))
    inner = b'{"dtype": "U8", "dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'
    assert "stands twice" in refusal(path, encode(b'{"a": ' + inner + b"}", DATA[:4]))


@pytest.mark.parametrize("dtype", ["F64", "F8_E5M2", "f32", "", "C64", "F4", None, 5, ["F32"], {"F32": 1}, "F32" * 500])
def test_types(path, dtype):
    message = refusal(path, encode(changed("a", dtype=dtype)))
    assert "'a'" in message and "supported: BOOL" in message


@pytest.mark.parametrize(
    "shape",
    [None, 6, "6", [2, 3.0], [2, -3], [-2, -3], [2, "3"], [2, True, 3], [[2, 3]], [2, None], {"0": 6}, [1] * 9 + [6]],
    ids=lambda value: str(value)[:30],
)
def test_shapes_of_the_wrong_kind(path, shape):
    message = refusal(path, encode(changed("a", shape=shape)))
    assert "'a'" in message and "shape" in message


@pytest.mark.parametrize(
    "shape",
    [[], [2], [2, 2], [2, 4], [6, 2], [0, 3], [2**31, 2**31], [2**40], [2**64], [2**63, 2], [10**1000] * 8, [2, 3, 2]],
    ids=lambda shape: f"{len(shape)} dims of {len(str(shape))} digits",
)
def test_shapes_that_do_not_fill_the_bytes(path, shape):
    assert "'a'" in refusal(path, encode(changed("a", shape=shape)))


@pytest.mark.parametrize("dim", [2**31, 2**40, 10**4000], ids=lambda dim: f"{len(str(dim))} digits")
def test_empty_tensors_of_huge_dimensions(path, dim):
    assert "'empty'" in refusal(path, encode(changed("empty", shape=[0, dim])))


@pytest.mark.parametrize(
    "offsets",
    [None, 24, "0", [], [0], [0, 24, 24], [-24, 0], [0, 24.0], [0, "24"], [False, 24], [[0, 24]], {"0": 24}],
    ids=lambda value: str(value)[:30],
)
def test_offsets_of_the_wrong_kind(path, offsets):
    message = refusal(path, encode(changed("a", data_offsets=offsets)))
    assert "'a'" in message and "offsets" in message


@pytest.mark.parametrize(
    ("name", "offsets"),
    [
        ("a", [24, 0]),
        ("a", [0, 25]),
        ("a", [0, 23]),
        ("a", [1, 25]),
        ("b", [25, 33]),
        ("b", [23, 31]),
        ("b", [0, 8]),
        ("b", [32, 40]),
        ("b", [40, 48]),
        ("scalar", [33, 41]),
        ("scalar", [24, 32]),
        ("scalar", [2**31, 2**31 + 8]),
        ("scalar", [2**63 - 8, 2**63]),
        ("scalar", [2**64 - 8, 2**64]),
        ("scalar", [2**64 + 32, 2**64 + 40]),
        ("scalar", [0, int("9" * 4300)]),
        ("empty", [31, 31]),
        ("empty", [41, 41]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_offsets_that_overlap_leave_gaps_or_leave_the_file(path, name, offsets):
    refusal(path, encode(changed(name, data_offsets=offsets)))


def test_gap_where_a_tensor_was(path):
    header = {name: entry for name, entry in HEADER.items() if name != "b"}
    assert "starts at byte" in refusal(path, encode(header))


@pytest.mark.parametrize("entry", [None, 3, "F32", [], ["F32", [2], [0, 8]], {}, True])
def test_entries_of_the_wrong_kind(path, entry):
    assert "'a'" in refusal(path, encode({**HEADER, "a": entry}))


def test_mlx_files_without_metadata(path):
    mx.save_safetensors(str(path), {"a": mx.ones((2,))})
    assert b'"__metadata__":null' in path.read_bytes(), "MLX changed: this test shows nothing any more"
    assert read_header(path)[1] == {}
    assert load_tensors(path)["a"].shape == (2,)


@pytest.mark.parametrize("metadata", [3, "pt", True, [["format", "pt"]]])
def test_metadata_of_the_wrong_kind(path, metadata):
    assert "__metadata__" in refusal(path, encode({**HEADER, "__metadata__": metadata}))


def test_long_and_odd_names_are_shown_short_and_on_one_line(path):
    for name in ("x" * 100_000, "line\nbreak", "\ud800", "", "\0", "é" * 500):
        refusal(path, encode({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 40]}}))


def test_random_bytes(path):
    rng = random.Random(3)
    for _ in range(300):
        refusal(path, rng.randbytes(rng.choice((0, 1, 7, 8, 9, 50, 2000))))


def _mutated(whole: bytes, rng: random.Random) -> bytes:
    out = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kind, at = rng.randrange(6), rng.randrange(len(out))
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.randrange(256)
        elif kind == 2:
            out[at] = rng.choice(b'0123456789"[]{}:,-. ')
        elif kind == 3:
            del out[at : at + rng.choice((1, 2, 8))]
        elif kind == 4:
            out[at:at] = rng.choice((b"0", b"9", b"-", b'"', b"[", b"\0", b'{"a":1}', b"e9", b"null"))
        else:
            out[rng.randrange(min(8, len(out)))] = rng.randrange(256)
        out = out or bytearray(b"\0")
    return bytes(out)


@pytest.mark.parametrize(
    ("count", "seed"),
    [
        pytest.param(FUZZ, 2, id="fast"),
        pytest.param(10_000, random.SystemRandom().randrange(1 << 32), id="full", marks=pytest.mark.full),
    ],
)
def test_mutated_files_are_read_or_refused(path, count, seed):
    print(f"seed {seed}")
    whole, rng = encode(HEADER), random.Random(seed)
    read = 0
    for i in range(count):
        content = _mutated(whole, rng)
        put(path, content)
        started = time.perf_counter()
        tracemalloc.start()
        try:
            tensors, _ = read_header(path)
        except FileFormatError as error:
            assert str(path) in str(error) and "\n" not in str(error), f"mutation {i}: {error}"
            with pytest.raises(FileFormatError):
                load_tensors(path)
            continue
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 24 * len(content) + 100_000, f"mutation {i}: {peak} bytes for a file of {len(content)}"
            assert time.perf_counter() - started < 2, f"mutation {i} took too long"
        try:
            loaded = load_tensors(path)
        except FileFormatError as error:
            assert str(path) in str(error), f"mutation {i}: {error}"
            continue
        read += 1
        mx.eval(list(loaded.values()))
        assert {name: info.shape for name, info in tensors.items()} == {n: a.shape for n, a in loaded.items()}, i
    assert read > count // 20, f"only {read} mutations were readable: the test sees one side only"
