"""The only module that touches the process's environment; the README lists what it does."""

from __future__ import annotations

import os
from pathlib import Path


def full_float32() -> None:
    """Keep float32 products in float32, unless the user has set MLX_ENABLE_TF32.

    MLX rounds their factors to TF32 (10 bits) by default on NVIDIA GPUs and on Apple GPUs with neural accelerators. The
    recurrent state and the block scores of sparse attention need the full 23. MLX reads the variable once, at its first
    product.
    """
    os.environ.setdefault("MLX_ENABLE_TF32", "0")


def cache_folder() -> Path | None:
    """The folder for what can be made again: ``mlx_moe`` in XDG_CACHE_HOME, else in ~/.cache; None without a home."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # others are to be ignored, says the XDG specification
        return given / "mlx_moe"
    try:
        return Path.home() / ".cache" / "mlx_moe"
    except RuntimeError:
        return None
