"""Choosing back ends and checking launches, without a GPU."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import mlx.core as mx
import pytest

from custom_kernels import dequant_gemv, dispatch
from custom_kernels.dequant_gemv import PAGE_BYTES, Arena, Matrix
from custom_kernels.ggml_blocks import format_by_name
from custom_kernels.portable import MAX_GROUPS, Geometry


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(dispatch, "_disabled", {})
    monkeypatch.setattr(dispatch, "_logged", set())


def test_the_cpu_runs_references_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    with caplog.at_level(logging.INFO):
        assert all(dispatch.choose("moce_route").backend == "reference" for _ in range(3))
    assert [r.message for r in caplog.records] == ["moce_route runs on reference: MLX runs on the CPU"]


def test_forced_and_disabled(caplog):
    with dispatch.forced("metal"):
        assert dispatch.choose("gdn_step").backend == "metal"
        with dispatch.forced("cuda"):
            assert dispatch.choose("gdn_step").backend == "cuda"
        assert dispatch.choose("gdn_step").backend == "metal"
    dispatch.disable("gdn_step", "wrong by 0.5 on this machine")
    assert dispatch.choose("gdn_step") == dispatch.Choice("reference", "wrong by 0.5 on this machine")
    assert "gdn_step falls back" in caplog.text


def test_variants_are_chosen_and_disabled_one_by_one(monkeypatch, caplog):
    gpu = dispatch.Choice("metal", "an imagined GPU")
    monkeypatch.setattr(dispatch, "device_choice", lambda: gpu)
    wrong, all_wrong = (dispatch.Choice("reference", reason) for reason in ("wrong", "all wrong"))
    for _ in range(2):
        dispatch.disable("block_gemv", "wrong", "IQ2_XS")
    assert dispatch.choose("block_gemv", "IQ2_XS") == wrong
    assert dispatch.choose("block_gemv", "Q8_0") == dispatch.choose("expert_down", "IQ2_XS") == gpu
    dispatch.disable("block_gemv", "all wrong")
    assert {dispatch.choose("block_gemv", variant) for variant in ("IQ2_XS", "Q8_0")} == {all_wrong}
    assert [record.message for record in caplog.records] == [
        "block_gemv IQ2_XS falls back to its reference: wrong",
        "block_gemv falls back to its reference: all wrong",
    ]


def test_packed_products_choose_by_format(monkeypatch):
    """A format that failed its check goes to the reference, also where it is half of a pair."""
    asked = []
    monkeypatch.setattr(dequant_gemv, "choose", lambda *args: asked.append(args) or dispatch.Choice("reference", ""))
    format = format_by_name("Q8_0")
    rows = mx.zeros((32, format.row_bytes(32)), dtype=mx.uint8)
    arena = Arena((mx.zeros((PAGE_BYTES,), dtype=mx.uint8),))
    words, x = mx.zeros((1, 1), dtype=mx.uint32), mx.zeros((1, 32))
    pair = Matrix(format, 32, 32), Matrix(format_by_name("IQ4_NL"), 32, 32)
    dequant_gemv.block_gemv(x, rows, format)
    dequant_gemv.block_dequantize(rows, format)
    dequant_gemv.expert_gate_up(x, words, arena, *pair)
    dequant_gemv.expert_down(x[:, None], words, arena, pair[1])
    assert asked == [
        ("block_gemv", "Q8_0"),
        ("block_dequantize", "Q8_0"),
        ("expert_gate_up", "Q8_0+IQ4_NL"),
        ("expert_down", "IQ4_NL"),
    ]


@pytest.mark.parametrize(
    ("grid", "threadgroup", "reason"),
    [
        ((512, 1, 1), (512, 1, 1), "threads"),
        ((64, 64, 1), (32, 16, 1), "threads"),
        ((100, 1, 1), (64, 1, 1), "multiple"),
        ((32, 1, 1), (64, 1, 1), "multiple"),
        ((64, 3, 1), (32, 2, 1), "multiple"),
        ((64, 0, 1), (64, 1, 1), "multiple"),
        ((32, 1 << 13, 1 << 12), (32, 1, 1), "threadgroups"),
        ((64, 1, 1), (0, 1, 1), "threads"),
    ],
)
def test_unsafe_launches_are_refused(grid, threadgroup, reason):
    with pytest.raises(ValueError, match=reason):
        Geometry(grid, threadgroup)


def test_safe_launches():
    assert Geometry((256, 48, 1), (256, 1, 1)).groups == 48
    assert Geometry.of_groups((7, 2, 3)) == Geometry((1792, 2, 3), (256, 1, 1))
    assert Geometry((32, MAX_GROUPS - 1, 1), (32, 1, 1)).groups == MAX_GROUPS - 1


def test_no_kernel_text_hides_the_name_that_BITS_becomes_on_cuda():
    """``const int bits = BITS(int, x)`` compiles for Metal and not for CUDA, where BITS is a function ``bits``."""
    folder = Path(dispatch.__file__).parent
    for path in [*folder.glob("*/kernel.py"), *folder.glob("*/*_kernel.py"), *folder.glob("*/device.py")]:
        hidden = re.findall(r"\b(?:int|uint|float|auto|size_t|ushort)\s+bits\b(?!\s*\()", path.read_text())
        assert not hidden, f"{path}: {hidden}"
