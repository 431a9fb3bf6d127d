"""Paths and seeds that tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import mlx_moe  # noqa: F401  first, since MLX reads what it sets in the environment only once

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))

ORACLE = ROOT.parent / "shared" / "data" / "oracle"


@pytest.fixture(scope="session")
def oracle() -> Path:
    """The folder of reference logits, where the machine has it; tests/golden covers the same ground everywhere."""
    if not (ORACLE / "oracle.npz").exists():
        pytest.skip(f"{ORACLE} is not here")
    return ORACLE


@pytest.fixture
def simulated_gpu(monkeypatch, tmp_path) -> Path:
    """As on a Mac: ops run on Metal text, which the simulator runs. Returns the cache folder, still empty."""
    from custom_kernels import dispatch
    from custom_kernels.portable import Launch
    from metal_sim import why_not
    from simulated import run

    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setattr(dispatch, "device_choice", lambda: dispatch.Choice("metal", "a simulated GPU"))
    monkeypatch.setattr(dispatch, "_disabled", {})
    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlx_moe"
