"""Choosing back ends and checking launches, without a GPU."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import mlx.core as mx
import pytest

from custom_kernels import dispatch
from custom_kernels.portable import MAX_GROUPS, Geometry


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(dispatch, "_disabled", {})
    monkeypatch.setattr(dispatch, "_logged", set())


def test_the_cpu_runs_references_and_says_so_once(caplog):
    with caplog.at_level(logging.INFO):
        assert all(dispatch.choose("moce_route").backend == "reference" for _ in range(3))
    if mx.default_device() == mx.Device(mx.cpu):
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
