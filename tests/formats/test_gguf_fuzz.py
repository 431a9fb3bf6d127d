"""Mutated GGUF files: each opens, or is refused in one line; no crash, no hang, no memory beyond the file's size."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from gguf_writer import Typed, encode, packed, shards
from mlx_moe.formats.gguf import open_gguf
from mlx_moe.formats.safetensors import FileFormatError

BYTES_PER_BYTE = 24
"""Python's own objects for the smallest entries of a header: a tensor's record for 24 bytes, a str for 8."""
ALLOWANCE = 100_000  # exceptions, paths, file objects
SECONDS = 2
HOSTILE = (0, 1, 2, 8, 9, 31, 32, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1)

RNG = np.random.default_rng(0)
METADATA = {
    "general.architecture": "qwen4exp",
    "general.alignment": 32,
    "tokens": ["a", "bc", "ä" * 20],
    "deep": [["a"], ["b", "c"]],
    **{kind: Typed(kind, 1) for kind in ("u8", "i16", "f32", "bool", "u64", "f64")},
    "numbers": Typed("[i32]", list(range(20))),
    "flags": Typed("[bool]", [True, False] * 10),
}
TENSORS = {
    "token_embd.weight": packed(RNG.standard_normal((4, 32)).astype(np.float32)),
    "blk.0.norm.weight": packed(mx.ones((32,)).astype(mx.bfloat16)),
    "blk.0.q2.weight": packed(mx.array(RNG.integers(0, 256, (3, 36), dtype=np.uint8)), "Q2_0"),
    "blk.0.exps.weight": packed(mx.array(RNG.integers(0, 256, (2, 2, 74), dtype=np.uint8)), "IQ2_XS"),
}


def mutated(whole: bytes, rng: random.Random) -> bytes:
    """One to four changes, mostly in the header."""
    out = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        size = max(len(out), 1)
        at = rng.randrange(min(size, 1400) if rng.random() < 0.9 else size)
        kind = rng.randrange(8)
        if kind == 0:
            out[at : at + 1] = bytes([(out[at] if out else 0) ^ 1 << rng.randrange(8)])
        elif kind == 1:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 2:
            out[at : at + 8] = struct.pack("<Q", rng.choice(HOSTILE))
        elif kind == 3:
            out[at : at + 4] = struct.pack("<I", rng.choice(HOSTILE) % 2**32)
        elif kind == 4:
            del out[at : at + rng.choice((1, 4, 8, 64))]
        elif kind == 5:
            out[at:at] = out[at : at + rng.choice((1, 4, 8, 64))]
        elif kind == 6:
            del out[at if rng.random() < 0.5 else size - 1 - rng.randrange(min(size, 64)) :]
        else:
            start = rng.randrange(size)
            out[at : at + 32] = out[start : start + 32]
    return bytes(out)


def attempt(path: Path, size: int) -> bool:
    """Whether the model opens; everything in it is then read as far as its formats are supported."""
    tracemalloc.start()
    started = time.perf_counter()
    try:
        file = open_gguf(path)
        for name, place in file.tensors.items():
            if place.size is not None:
                array = file.read(name)
                mx.eval(array)
                assert array.nbytes == place.size
        return True
    except FileFormatError as error:
        message = str(error)
        assert str(path.parent) in message and "\n" not in message and len(message) < 1500, message[:500]
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < BYTES_PER_BYTE * size + ALLOWANCE, f"{peak} bytes for a file of {size}"
        assert time.perf_counter() - started < SECONDS


def fuzz(folder: Path, files: list[bytes], count: int, seed: int) -> None:
    """Open ``count`` models of which one file is mutated."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    paths = [folder / f"model-{i + 1:05d}-of-{len(files):05d}.gguf" for i in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_bytes(content)
    opened = 0
    for i in range(count):
        which = rng.randrange(len(files))
        content = mutated(files[which], rng)
        paths[which].unlink()  # writing over an old one is much slower on journalling file systems
        paths[which].write_bytes(content)
        try:
            opened += attempt(paths[rng.randrange(len(files))], sum(map(len, files)) + len(content))
        except BaseException:
            print(f"mutation {i}: {content!r}")
            raise
        paths[which].unlink()
        paths[which].write_bytes(files[which])
    assert count // 50 < opened < count - count // 50, f"{opened} of {count} open: the test sees one side only"


TIERS = [
    pytest.param(400, 1, id="fast"),
    pytest.param(10_000, random.SystemRandom().randrange(1 << 32), id="full", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("count", "seed"), TIERS)
@pytest.mark.parametrize("version", [2, 3])
def test_mutated_files(tmp_path, version, count, seed):
    fuzz(tmp_path, [encode(METADATA, TENSORS, version=version)], count, seed)


@pytest.mark.parametrize(("count", "seed"), TIERS)
def test_mutated_shards(tmp_path, count, seed):
    fuzz(tmp_path, shards(METADATA, TENSORS, 3), count // 2, seed)


@pytest.mark.parametrize("dense", ["tensors", "strings", "numbers", "arrays"])
def test_memory_of_the_densest_headers(tmp_path, dense):
    """Files that are nothing but the smallest possible entries."""
    count = 1000
    tensors = {f"{i}": packed(np.zeros((1,), dtype=np.float32)) for i in range(count)} if dense == "tensors" else {}
    metadata = {
        "tensors": {},
        "strings": {"s": ["ab"] * count},
        "numbers": {"n": Typed("[u16]", range(1000, 1000 + count))},
        "arrays": {"a": [Typed("[u8]", [])] * count},
    }[dense]
    content = encode(metadata, tensors)
    (tmp_path / "model.gguf").write_bytes(content)
    assert attempt(tmp_path / "model.gguf", len(content))
