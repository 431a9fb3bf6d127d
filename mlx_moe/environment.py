"""The only module that touches the process's environment; the README lists what it does."""

from __future__ import annotations

import os
from pathlib import Path

_DEFAULTS = {
    # MLX rounds factors of float32 products to TF32 (10 bits) by default on NVIDIA GPUs and on Apple GPUs with neural
    # accelerators. The recurrent state and the block scores of sparse attention need the full 23.
    "MLX_ENABLE_TF32": "0",
    # MLX's CUDA back end hands single queries to cuDNN or not by how the cache's buffer lies in memory, so a token's
    # bits would depend on the window that it came in.
    "MLX_CUDA_USE_CUDNN_SDPA": "0",
    # MLX ends a command buffer after so many MB of inputs and counts the whole arena among them, so that every op on
    # experts would end one. Its limit on the number of ops stays.
    "MLX_MAX_MB_PER_BUFFER": "1000000",
}


def steady_numbers() -> None:
    """Settings of MLX that we need, unless the user has set them. MLX reads them once, at their first use."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def cache_folder() -> Path | None:
    """The folder for what can be made again: ``mlx_moe`` in XDG_CACHE_HOME, else in ~/.cache; None without a home."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # others are to be ignored, says the XDG specification
        return given / "mlx_moe"
    try:
        return Path.home() / ".cache" / "mlx_moe"
    except RuntimeError:
        return None
