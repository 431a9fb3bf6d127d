"""Every call that differs by system or device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit


@contextlib.contextmanager
def wired_memory() -> Iterator[None]:
    """Keep the weights resident while generating (macOS); the earlier limit comes back afterwards."""
    earlier = maybe_set_recommended_wired_limit()
    try:
        yield
    finally:
        if earlier is not None:
            mx.synchronize()
            mx.set_wired_limit(earlier)


def peak_memory_gb() -> float:
    """Peak memory of MLX's arrays so far, in GB."""
    return mx.get_peak_memory() / 1e9
