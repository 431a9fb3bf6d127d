"""Running a launch where this machine can: Metal text on the simulator, and on the GPU if there is one."""

from __future__ import annotations

import mlx.core as mx
import pytest

from custom_kernels.portable import Launch
from metal_sim import verify, why_not


def _skip_reason(where: str) -> str:
    if where == "simulator":
        return why_not() or ""
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    return "" if on_gpu else "MLX runs on the CPU"


EVERYWHERE = [
    pytest.param(where, marks=pytest.mark.skipif(bool(_skip_reason(where)), reason=_skip_reason(where)))
    for where in ("simulator", "gpu")
]
"""Values for a parameter ``where``."""


def outputs(launch: Launch, where: str) -> list[mx.array]:
    """What the kernel computes; on the simulator under three schedules, which must agree."""
    if where == "simulator":
        return verify(launch.kernel.metal, **launch.arguments)
    return launch.run("metal" if mx.metal.is_available() else "cuda")
