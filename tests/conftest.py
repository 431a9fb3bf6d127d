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
