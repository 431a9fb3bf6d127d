"""The only module that touches the process's environment; the README lists what it does."""

from __future__ import annotations

import os


def full_float32() -> None:
    """Keep float32 products in float32, unless the user has set MLX_ENABLE_TF32.

    MLX rounds their factors to TF32 (10 bits) by default on NVIDIA GPUs and on Apple GPUs with neural accelerators. The
    recurrent state and the block scores of sparse attention need the full 23. MLX reads the variable once, at its first
    product.
    """
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
