"""Records written through the arena's NumPy view and then read by a kernel: right beyond 4 GiB, and how fast.

usage: python scripts/bench_arena.py [--gib 6] [--rounds 20]

One chunk of so many GiB holds records of the real model's size (IQ2_XS gate and up, IQ4_NL down). Slots from all over
it are written by the host and used by ``expert_gate_up`` at once; outputs must equal those of the same bytes in a chunk
of their own, and of the reference. Then ten records at a time are written and used, against ten that stay as they are.
Prints milliseconds, GB/s and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from custom_kernels import dispatch
from custom_kernels.dequant_gemv import Matrix, expert_gate_up
from custom_kernels.ggml_blocks import format_by_name
from mlx_moe.paging.arena import MAX_CHUNK_BYTES, SlotArena, pages_of
from mlx_moe.platform import device

H, WIDTH, TOP_K = 2560, 640, 10
GATE = Matrix(format_by_name("IQ2_XS"), WIDTH, H, 0)
UP = Matrix(GATE.format, WIDTH, H, WIDTH * GATE.row_bytes)
DOWN = Matrix(format_by_name("IQ4_NL"), H, WIDTH, 2 * UP.offset)
RECORD_BYTES = DOWN.offset + H * DOWN.row_bytes
TOLERANCE = 1e-5


def record(rng: np.random.Generator) -> np.ndarray:
    """Random blocks without large scales or NaN, uint8 [RECORD_BYTES]."""
    words = rng.integers(0, 1 << 30, -(-RECORD_BYTES // 4), dtype=np.uint32) & np.uint32(0x3F3F3F3F)
    return words.view(np.uint8)[:RECORD_BYTES]


def used(arena: SlotArena, words: Sequence[int], x: mx.array) -> mx.array:
    """Outputs [1, n, WIDTH] of the experts in these slots."""
    return expert_gate_up(x, mx.array([list(words)], dtype=mx.uint32), arena.arena, GATE, UP)


def check(arena: SlotArena, words: Sequence[int], records: Sequence[np.ndarray], x: mx.array) -> float:
    """The largest relative error of slots that were just written; exits where it is more than rounding."""
    alone = SlotArena([(RECORD_BYTES, len(words))], 1 << 30)
    places = [alone.allocate(RECORD_BYTES) for _ in words]
    for word, place, data in zip(words, places, records, strict=True):
        arena.view(word, RECORD_BYTES)[:] = data
        alone.view(place, RECORD_BYTES)[:] = data
    y, same = used(arena, words, x), used(alone, places, x)
    if not mx.array_equal(y, same):
        sys.exit("outputs depend on where records stand in the arena")
    with dispatch.forced("reference"):
        right = used(alone, places, x)
    error = (mx.abs(y - right).max() / mx.abs(right).max()).item()
    if not error < TOLERANCE:
        sys.exit(f"outputs of written slots are off by {error:.1e}")
    return error


def milliseconds(
    arena: SlotArena, groups: Sequence[Sequence[int]], data: Sequence[np.ndarray] | None, x: mx.array
) -> float:
    """For writing (where there is data) and using ten records; the median over the groups."""
    times = []
    for words in groups:
        start = time.perf_counter()
        for word, one in zip(words, data or [], strict=False):
            arena.view(word, RECORD_BYTES)[:] = one
        mx.eval(used(arena, words, x))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main(argv: list[str] | None = None) -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=6, help="of the chunk (default 6, at most 8)")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    size = pages_of(RECORD_BYTES) * (1 << 14)
    count = (min(int(args.gib * (1 << 30)), MAX_CHUNK_BYTES) - (1 << 14)) // size
    arena = SlotArena([(RECORD_BYTES, count)], 16 << 30)
    words = [arena.allocate(RECORD_BYTES) for _ in range(count)]
    rng, x = np.random.default_rng(0), mx.random.normal((1, H))
    data = [record(rng) for _ in range(TOP_K)]
    ends = [*words[: TOP_K // 2], *words[-(TOP_K - TOP_K // 2) :]]
    error = check(arena, ends, data, x)
    groups = [rng.choice(words, TOP_K, replace=False).tolist() for _ in range(args.rounds)]
    fresh, still = milliseconds(arena, groups, data, x), milliseconds(arena, groups, None, x)
    again = milliseconds(arena, groups, data, x)
    megabytes = TOP_K * RECORD_BYTES / 1e6
    print(f"{device().name}, chunk of {arena.nbytes / 2**30:.2f} GiB, error {error:.1e}")
    for name, ms in (("written and used, first", fresh), ("written and used, again", again), ("used", still)):
        print(f"ten records, {megabytes:.1f} MB, {name:24} {ms:8.3f} ms {megabytes / ms:8.2f} GB/s")
    print(json.dumps({"bench": "arena", "written_ms": again, "first_ms": fresh, "used_ms": still, "mb": megabytes}))


if __name__ == "__main__":
    main()
