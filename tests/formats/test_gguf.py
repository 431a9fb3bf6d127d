"""GGUF headers: what is whole is read as stated, and everything else is refused in one line that names the file."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.ggml_blocks import FORMATS, format_by_name
from gguf_writer import ARRAY, STRING, Tensor, Typed, encode, packed, text
from mlx_moe.formats.gguf import open_gguf, read_header
from mlx_moe.formats.safetensors import FileFormatError

META = {"general.architecture": "test", "general.name": "zwölf"}
RNG = np.random.default_rng(0)
ONE = packed(np.arange(6, dtype=np.float32).reshape(2, 3))


def blocks(format: str, *lead: int, weights: int = 256) -> mx.array:
    return mx.array(RNG.integers(0, 256, (*lead, format_by_name(format).row_bytes(weights)), dtype=np.uint8))


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "some-model.gguf"


def refusal(path: Path, content: bytes) -> str:
    """The message with which a file is refused."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    with pytest.raises(FileFormatError) as caught:
        read_header(path)
    message = str(caught.value)
    assert str(path) in message, f"the file is not named: {message}"
    assert "\n" not in message and len(message) < len(str(path)) + 400, message[:500]
    return message


def written(path: Path, *args, **options) -> Path:
    path.write_bytes(encode(*args, **options))
    return path


# Whole files


@pytest.mark.parametrize("version", [2, 3])
def test_a_whole_file(path, version):
    arrays = {
        "f32": mx.array(RNG.standard_normal((2, 3)).astype(np.float32)),
        "f16": mx.array(RNG.standard_normal((5,)).astype(np.float16)),
        "bf16": mx.array(RNG.standard_normal((3, 2, 4)).astype(np.float32)).astype(mx.bfloat16),
        "one": mx.array(2.5),
    }
    bytes_of = {format.name: blocks(format.name, 3, 2) for format in FORMATS if format.block_weights > 1}
    tensors = {name: packed(array) for name, array in arrays.items()}
    tensors |= {name: packed(array, name) for name, array in bytes_of.items()}
    file = open_gguf(written(path, META, tensors, version=version))
    assert file.metadata == META and file.paths == (path,)
    assert list(file.tensors) and set(file.tensors) == set(tensors)
    for name, array in {**arrays, **bytes_of}.items():
        got = file.read(name)
        assert got.dtype == array.dtype and got.shape == array.shape, name
        assert mx.array_equal(got, array).item(), f"{name} is not what was written"
    for name in bytes_of:
        place = file.place(name)
        assert place.format.name == name and place.shape == (3, 2, 256), name
        assert place.size == 6 * place.row_bytes and place.offset % 32 == 0, name
        with place.file.open("rb") as stream:
            stream.seek(place.offset)
            assert stream.read(place.size) == np.array(bytes_of[name]).tobytes(), name


def test_values_of_every_type(path):
    numbers = {"u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31)}
    numbers |= {"u64": 2**64 - 1, "i64": -(2**63), "f32": 0.5, "f64": 1e300, "bool": True}
    metadata = {kind: Typed(kind, value) for kind, value in numbers.items()}
    metadata |= {f"[{kind}]": Typed(f"[{kind}]", [value, value]) for kind, value in numbers.items()}
    metadata |= {
        "text": "a\nb",
        "texts": ["", "ä", "x" * 1000],
        "none": Typed("[u64]", []),
        "deep": [["a", "b"], ["c"]],
    }
    got = read_header(written(path, metadata)).metadata
    want = {**numbers, **{f"[{kind}]": (value, value) for kind, value in numbers.items()}}
    want |= {"text": "a\nb", "texts": ("", "ä", "x" * 1000), "none": (), "deep": (("a", "b"), ("c",))}
    assert got == want
    assert all(type(got[key]) is type(want[key]) for key in want)


def test_no_tensors_and_no_keys(path):
    header = read_header(written(path, {}))
    assert header.metadata == {} and header.tensors == {}


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096, 65536])
def test_alignment(path, alignment):
    metadata = {**META, "general.alignment": alignment}
    file = open_gguf(written(path, metadata, {"a": ONE, "b": ONE}, alignment=alignment))
    assert [file.place(name).offset % alignment for name in "ab"] == [0, 0]
    assert mx.array_equal(file.read("b"), mx.arange(6.0).reshape(2, 3)).item()


def test_a_gap_and_any_order_of_tensors(path):
    """Only overlaps are wrong: writers may pad, and need not write tensors in the order of their infos."""
    data = np.arange(6, dtype=np.float32)
    first = Tensor((3,), 0, b"", 96)
    second = Tensor((3,), 0, bytes(12) + data.tobytes() + bytes(96), 0)
    path.write_bytes(encode(META, {"late": first, "early": second}))
    assert {name: place.shape for name, place in read_header(path).tensors.items()} == {"late": (3,), "early": (3,)}


def test_the_last_tensor_need_not_be_padded(path):
    content = encode(META, {"a": ONE})
    path.write_bytes(content[: len(content) - 8])
    assert mx.array_equal(open_gguf(path).read("a"), mx.arange(6.0).reshape(2, 3)).item()


@pytest.mark.parametrize("type_id", [2, 10, 24, 31, 43, 2**32 - 1])
def test_unsupported_types_are_named_when_they_are_asked_for(path, type_id):
    file = open_gguf(written(path, META, {"good": ONE, "odd": Tensor((256,), type_id, bytes(64))}))
    assert file.read("good").shape == (2, 3)
    assert file.place("odd").size is None
    for ask in (lambda: file.read("odd"), lambda: file.place("odd").format, lambda: file.place("odd").row_bytes):
        with pytest.raises(FileFormatError, match=rf"some-model.*'odd'.*type id {type_id} .*17 IQ2_XS"):
            ask()


def test_a_tensor_that_is_not_there(path):
    with pytest.raises(FileFormatError, match=r"some-model.*'b' is missing"):
        open_gguf(written(path, META, {"a": ONE})).read("b")


def test_a_file_that_changes_after_opening(path):
    file = open_gguf(written(path, META, {"a": ONE}))
    os.truncate(path, path.stat().st_size - 32)
    with pytest.raises(FileFormatError, match=r"some-model.*shorter"):
        file.read("a")
    path.unlink()
    with pytest.raises(FileFormatError, match=r"some-model.*cannot be read"):
        file.read("a")


@pytest.mark.full
def test_a_large_vocabulary_is_fast_and_small(path):
    count = 250_000
    tokens = [f"token{i}" for i in range(count)]
    metadata = {"tokens": tokens, "merges": [f"{t[:3]} {t[3:]}" for t in tokens], "types": Typed("[i32]", [1] * count)}
    size = written(path, metadata).stat().st_size
    started = time.perf_counter()
    header = read_header(path)
    assert time.perf_counter() - started < 3, "half a million strings take less than a second on an idle machine"
    assert header.metadata["tokens"] == tuple(tokens)
    del header
    tracemalloc.start()
    read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * size, f"{peak} bytes for a header of {size}"


# Hostile files


def test_what_is_no_file(path, tmp_path):
    with pytest.raises(FileFormatError, match=r"some-model.*cannot be read"):
        read_header(path)
    os.mkfifo(path)
    with pytest.raises(FileFormatError, match=r"some-model.*is not a file"):
        read_header(path)
    with pytest.raises(FileFormatError, match="is not a file"):
        read_header(tmp_path)
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_header("a\0b.gguf")


@pytest.mark.parametrize(
    "content", [b"", b"G", b"GGML" + bytes(40), b"PK\3\4" + bytes(60), b"ggjt" + bytes(40)], ids=str
)
def test_not_a_gguf(path, content):
    assert "not a GGUF file" in refusal(path, content)


def test_a_pointer_file_of_git_lfs(path):
    assert "Git LFS pointer" in refusal(path, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")


@pytest.mark.parametrize("version", [0, 1, 4, 2**31])
def test_other_versions(path, version):
    assert f"version {version}" in refusal(path, encode(META, version=version))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_big_endian(path, version):
    assert "big-endian" in refusal(path, b"GGUF" + struct.pack(">IQQ", version, 0, 0) + bytes(32))


def test_truncated_at_every_byte(path):
    whole = encode({**META, "list": ["a", "b"], "n": 3}, {"a": ONE, "b": packed(blocks("Q8_0"), "Q8_0")})
    for size in range(len(whole) - 16):  # the last 16 are padding
        refusal(path, whole[:size])


@pytest.mark.parametrize("count", [2, 100, 2**31, 2**32, 2**61, 2**63, 2**64 - 1])
@pytest.mark.parametrize("which", ["tensors", "keys"])
def test_hostile_counts(path, count, which):
    counts = (count, len(META)) if which == "tensors" else (1, count + 1 if count < 2**64 - 1 else count)
    refusal(path, encode(META, {"a": ONE}, counts=counts))


@pytest.mark.parametrize("size", [100, 2**31, 2**32, 2**63, 2**64 - 1])
def test_hostile_string_lengths(path, size):
    long = struct.pack("<Q", size) + b"abc"
    head = struct.pack("<IQQ", 3, 0, 1)
    refusal(path, b"GGUF" + head + long)
    refusal(path, b"GGUF" + head + text("key") + struct.pack("<I", STRING) + long)
    refusal(path, b"GGUF" + head + text("key") + struct.pack("<IIQ", ARRAY, STRING, 1) + long)
    refusal(path, b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + long + bytes(16))


@pytest.mark.parametrize("kind", [0, 4, 7, 8, 9, 10, 12])
@pytest.mark.parametrize("count", [1000, 2**31, 2**60, 2**64 - 1])
def test_hostile_array_lengths(path, kind, count):
    assert "'list'" in refusal(path, encode({"list": struct.pack("<IIQ", ARRAY, kind, count) + bytes(40)}))


@pytest.mark.parametrize("kind", [13, 255, 2**32 - 1])
def test_unknown_value_types(path, kind):
    assert f"type {kind}" in refusal(path, encode({"odd": struct.pack("<I", kind) + bytes(64)}))
    assert f"type {kind}" in refusal(path, encode({"odd": struct.pack("<IIQ", ARRAY, kind, 2) + bytes(64)}))


def test_arrays_in_arrays(path):
    value = struct.pack("<IQ", 4, 0)
    for depth in range(1, 3):
        value = struct.pack("<IQ", ARRAY, 1) + value
        assert read_header(written(path, {"deep": struct.pack("<I", ARRAY) + value})).metadata, depth
    for depth in (3, 100_000):
        deep = struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", 4, 0)
        assert "nests arrays" in refusal(path, encode({"deep": struct.pack("<I", ARRAY) + deep}))


def test_names_that_stand_twice(path):
    assert "'key' stands twice" in refusal(path, encode([("key", 1), ("key", 1)]))
    assert "'a' stands twice" in refusal(path, encode(META, [("a", ONE), ("a", ONE)]))


def test_names_that_are_not_text(path):
    assert "not UTF-8" in refusal(path, encode({b"\xff\xfe": 1}))
    assert "not UTF-8" in refusal(path, encode(META, {b"\xff\xfe": ONE}))
    assert "not UTF-8" in refusal(path, encode({"key": struct.pack("<I", STRING) + text(b"\xc3")}))
    assert "not UTF-8" in refusal(path, encode({"key": struct.pack("<IIQ", ARRAY, STRING, 1) + text(b"\xc3")}))


@pytest.mark.parametrize("name", ["x" * 257, "x" * 100_000])
def test_long_tensor_names(path, name):
    assert "allowed are 256" in refusal(path, encode(META, {name: ONE}))


def test_odd_names_stay_on_one_line(path):
    refusal(path, encode(META, [("a\nb" * 50, ONE), ("a\nb" * 50, ONE)]))
    refusal(path, encode([("k\n" * 5000, 1), ("k\n" * 5000, 1)]))
    refusal(path, encode([("k" * 70_000, 1)]))


@pytest.mark.parametrize("value", [0, 1, 4, 12, 33, 2**17, 2**31, -8, 32.0, "32", True, [32]], ids=str)
def test_absurd_alignments(path, value):
    value = Typed("i32", value) if isinstance(value, int) and value < 0 else value
    assert "general.alignment" in refusal(path, encode({"general.alignment": value}, {"a": ONE}))


@pytest.mark.parametrize("dims", [(0,), (3, 0), (2**31,), (2**40,), (2**63,), (2**64 - 1, 2**64 - 1), (2**31 - 1,) * 4])
def test_hostile_dimensions(path, dims):
    assert "'a'" in refusal(path, encode(META, {"a": Tensor(dims, 0, bytes(64))}))


@pytest.mark.parametrize("count", [5, 1000, 2**32 - 1])
def test_too_many_dimensions(path, count):
    head = encode(META, counts=(1, 2)).rstrip(b"\0")
    info = text("a") + struct.pack("<I", count) + bytes(8 * min(count, 1000))
    assert "dimensions" in refusal(path, head + info)


@pytest.mark.parametrize(("type_id", "width"), [(17, 255), (17, 128), (42, 100), (8, 33), (20, 16)])
def test_rows_that_are_not_whole_blocks(path, type_id, width):
    assert "not a multiple" in refusal(path, encode(META, {"a": Tensor((width, 4), type_id, bytes(4096))}))


@pytest.mark.parametrize("offset", [32, 64, 2**20, 2**63, 2**64 - 32])
def test_tensors_beyond_the_end(path, offset):
    assert "beyond the file" in refusal(path, encode(META, {"a": Tensor((8,), 0, bytes(32), offset)}))
    odd = Tensor((8,), 99, bytes(32), max(offset, 64))
    assert "beyond the file" in refusal(path, encode(META, {"a": odd}))


@pytest.mark.parametrize("offset", [1, 8, 16, 31, 33])
def test_misaligned_tensors(path, offset):
    assert "alignment 32" in refusal(path, encode(META, {"a": Tensor((2,), 0, bytes(64), offset)}))


@pytest.mark.parametrize("type_id", [0, 99])
def test_overlapping_tensors(path, type_id):
    inner = Tensor((2,), type_id, bytes(64), 32)
    outer = Tensor((32,), 0, bytes(128), 0)
    assert "overlaps" in refusal(path, encode(META, {"inner": inner, "outer": outer}))
    same = Tensor((2,), type_id, bytes(64), 0)
    assert "overlaps" in refusal(path, encode(META, {"same": same, "outer": outer}))
