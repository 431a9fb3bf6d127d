"""Where experts lie: reads of records, whatever the layout of the files."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlx_moe.paging.index import ExpertIndex, JoinedRows, LayerIndex, Part, PartIndex, RowIndex

A, B = Path("a"), Path("b")


def part(length: int, files: list[int], offsets: list[int]) -> PartIndex:
    return PartIndex("X", (2, 3), length, np.array(files, dtype=np.int32), np.array(offsets, dtype=np.int64))


def test_three_tensors_are_three_reads():
    gate = PartIndex.strided("X", (2, 3), 10, 0, 1000, 10, 4)
    up = PartIndex.strided("X", (2, 3), 10, 0, 2000, 10, 4)
    down = PartIndex.strided("Y", (3, 2), 7, 1, 1 << 40, 7, 4)
    layer = LayerIndex(gate, up, down)
    assert (layer.experts, layer.record_bytes, layer.places) == (4, 39, (0, 16, 32))
    reads = ExpertIndex((A, B), (layer,)).reads(0, 3)
    assert reads == (Part(A, 1030, 10, 0), Part(A, 2030, 10, 16), Part(B, (1 << 40) + 21, 7, 32))
    assert all(type(number) is int for read in reads for number in (read.offset, read.length, read.at))


def test_neighbours_are_read_at_once():
    """Joined gate and up, and whole records."""
    joined = LayerIndex(part(16, [0, 0], [0, 32]), part(16, [0, 0], [16, 48]), part(7, [0, 1], [90, 64]))
    record = LayerIndex(part(16, [0, 1], [0, 64]), part(16, [0, 1], [16, 80]), part(7, [0, 1], [32, 96]))
    index = ExpertIndex((A, B), (joined, record))
    assert index.reads(0, 1) == (Part(A, 32, 32, 0), Part(B, 64, 7, 32)), "the same offset in another file"
    assert index.reads(1, 0) == (Part(A, 0, 39, 0),)
    assert index.reads(1, 1) == (Part(B, 64, 39, 0),)


def test_neighbours_with_a_gap_in_the_record_are_read_apart():
    """Kernels read words, so every part starts at a multiple of 16 bytes."""
    layer = LayerIndex(part(10, [0], [0]), part(22, [0], [10]), part(7, [0], [32]))
    assert (layer.places, layer.record_bytes) == ((0, 16, 48), 55)
    assert ExpertIndex((A,), (layer,)).reads(0, 0) == (Part(A, 0, 10, 0), Part(A, 10, 22, 16), Part(A, 32, 7, 48))


def test_layers_of_two_sets_of_files():
    one = LayerIndex(part(16, [0], [0]), part(16, [0], [16]), part(7, [1], [3]))
    two = LayerIndex(part(16, [0], [5]), part(16, [0], [21]), part(7, [0], [99]))
    index = ExpertIndex((A, B), (one,)).joined(ExpertIndex((Path("c"),), (two,)))
    assert index.files == (A, B, Path("c")) and len(index.layers) == 2
    assert index.reads(0, 0) == (Part(A, 0, 32, 0), Part(B, 3, 7, 32))
    assert index.reads(1, 0) == (Part(Path("c"), 5, 32, 0), Part(Path("c"), 99, 7, 32))


def test_scattered_experts():
    """One tensor per expert and part, as in checkpoints, in any order and file."""
    layer = LayerIndex(part(16, [1, 0], [50, 0]), part(16, [0, 0], [66, 16]), part(7, [0, 1], [3, 32]))
    index = ExpertIndex((A, B), (layer,))
    assert index.reads(0, 0) == (Part(B, 50, 16, 0), Part(A, 66, 16, 16), Part(A, 3, 7, 32))
    assert index.reads(0, 1) == (Part(A, 0, 32, 0), Part(B, 32, 7, 32))


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


def test_scales_stand_behind_the_matrices():
    """Those of up and down, of which down's follow up's in file and record; in joined indices too."""
    up, down = (replace(part(20, [0], [at]), scales=part(16, [1], [s])) for at, s in ((100, 7), (200, 23)))
    layer = LayerIndex(part(16, [0], [0]), up, down)
    assert (layer.places, layer.scale_places, layer.record_bytes) == ((0, 16, 48), (None, 80, 96), 112)
    want = (Part(A, 0, 16, 0), Part(A, 100, 20, 16), Part(A, 200, 20, 48), Part(B, 7, 32, 80))
    index = ExpertIndex((A, B), (layer,))
    assert index.reads(0, 0) == want
    moved = ExpertIndex((B,), ()).joined(index)
    assert moved.reads(0, 0) == want and moved.files == (B, A, B)
    with pytest.raises(ValueError, match="not among the 1"):
        ExpertIndex((A,), (layer,))
    with pytest.raises(ValueError, match="scales of 2 experts for 1"):
        replace(part(20, [0], [0]), scales=part(4, [0, 0], [0, 4]))


def test_rows_in_several_parts():
    parts = tuple(RowIndex(file, at, rows, 8, 16, "BF16") for file, at, rows in ((A, 100, 3), (B, 0, 1), (A, 7, 2)))
    table = JoinedRows(parts)
    assert (table.rows, table.width, table.row_bytes, table.format, table.scale) == (6, 8, 16, "BF16", None)
    places = [(A, 100), (A, 116), (A, 132), (B, 0), (A, 7), (A, 23)]
    files, offsets = table.places(np.arange(6))
    assert [(table.files[i], at) for i, at in zip(files, offsets.tolist(), strict=True)] == places
    assert [table.row(*place) for place in zip(files, (offsets + 15).tolist(), strict=True)] == list(range(6))
    assert parts[0].places(np.array([2])) == (0, 132) and parts[0].row(0, 147) == 2
    with pytest.raises(ValueError, match="3 parts of 2 kinds"):
        JoinedRows((*parts[:2], replace(parts[2], scale=2.0)))
