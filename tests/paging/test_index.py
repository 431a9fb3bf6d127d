"""Where experts lie: reads of records, whatever the layout of the files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlx_moe.paging.index import ExpertIndex, LayerIndex, Part, PartIndex

A, B = Path("a"), Path("b")


def part(length: int, files: list[int], offsets: list[int]) -> PartIndex:
    return PartIndex("X", (2, 3), length, np.array(files, dtype=np.int32), np.array(offsets, dtype=np.int64))


def test_three_tensors_are_three_reads():
    gate = PartIndex.strided("X", (2, 3), 10, 0, 1000, 10, 4)
    up = PartIndex.strided("X", (2, 3), 10, 0, 2000, 10, 4)
    down = PartIndex.strided("Y", (3, 2), 7, 1, 1 << 40, 7, 4)
    layer = LayerIndex(gate, up, down)
    assert (layer.experts, layer.record_bytes, layer.places) == (4, 27, (0, 10, 20))
    reads = ExpertIndex((A, B), (layer,)).reads(0, 3)
    assert reads == (Part(A, 1030, 10, 0), Part(A, 2030, 10, 10), Part(B, (1 << 40) + 21, 7, 20))
    assert all(type(number) is int for read in reads for number in (read.offset, read.length, read.at))


def test_neighbours_are_read_at_once():
    """Joined gate and up, and whole records."""
    joined = LayerIndex(part(10, [0, 0], [0, 20]), part(10, [0, 0], [10, 30]), part(7, [0, 1], [90, 40]))
    record = LayerIndex(part(10, [0, 1], [0, 64]), part(10, [0, 1], [10, 74]), part(7, [0, 1], [20, 84]))
    index = ExpertIndex((A, B), (joined, record))
    assert index.reads(0, 1) == (Part(A, 20, 20, 0), Part(B, 40, 7, 20)), "the same offset in another file"
    assert index.reads(1, 0) == (Part(A, 0, 27, 0),)
    assert index.reads(1, 1) == (Part(B, 64, 27, 0),)


def test_scattered_experts():
    """One tensor per expert and part, as in checkpoints, in any order and file."""
    layer = LayerIndex(part(10, [1, 0], [50, 0]), part(10, [0, 0], [60, 10]), part(7, [0, 1], [3, 20]))
    index = ExpertIndex((A, B), (layer,))
    assert index.reads(0, 0) == (Part(B, 50, 10, 0), Part(A, 60, 10, 10), Part(A, 3, 7, 20))
    assert index.reads(0, 1) == (Part(A, 0, 20, 0), Part(B, 20, 7, 20))


@pytest.mark.parametrize(
    ("length", "files", "offsets"),
    [(0, [0], [0]), (-1, [0], [0]), (5, [0], [0, 5]), (5, [0], [-5]), (5, [-1], [0]), (5, [[0]], [[0]])],
)
def test_parts_that_cannot_be(length, files, offsets):
    with pytest.raises(ValueError):
        part(length, files, offsets)


def test_layers_that_cannot_be():
    one, two = part(5, [0], [0]), part(5, [0, 1], [0, 5])
    with pytest.raises(ValueError, match="experts"):
        LayerIndex(one, one, two)
    with pytest.raises(ValueError, match="layer 1 names a file"):
        ExpertIndex((A,), (LayerIndex(one, one, one), LayerIndex(two, two, two)))


def test_the_index_loads_no_mlx():
    code = "import sys, mlx_moe.paging.index; assert 'mlx.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
