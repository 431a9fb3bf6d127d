"""Launches on the Metal simulator in place of a GPU, and kernels that are changed on purpose."""

from __future__ import annotations

from types import ModuleType

import mlx.core as mx
import pytest

from custom_kernels.dequant_gemv import expert_kernel
from custom_kernels.gdn_step import kernel as gdn
from custom_kernels.moce_route import kernel as route
from custom_kernels.portable import Launch, PortableKernel
from metal_sim import MetalError, verify


def run(launch: Launch, backend: str, poison: float | None = None) -> list[mx.array]:
    """``Launch.run`` by the simulator; what it finds is raised as MLX raises what a GPU's compiler finds."""
    assert backend == "metal"
    try:
        return verify(launch.kernel.metal, **launch.arguments, init_value=poison)
    except MetalError as error:
        raise RuntimeError(str(error)) from None


KERNELS: dict[str, tuple[ModuleType, str]] = {
    "gdn_step": (gdn, "GDN_STEP"),
    "gdn_commit": (gdn, "GDN_COMMIT"),
    "moce_route": (route, "MOCE_ROUTE"),
    "expert_combine": (expert_kernel, "EXPERT_COMBINE"),
}
"""op: where its kernel is."""

WRONG_BASE = "#define exp(x) exp2(x)\n"
"""A header that makes a kernel wrong which compiles, runs and gives plausible numbers."""


def change_kernel(monkeypatch: pytest.MonkeyPatch, op: str, header: str = "", start: str = "") -> None:
    """Put text in front of a kernel's header and of its body."""
    module, name = KERNELS[op]
    kernel: PortableKernel = getattr(module, name)
    assert header != WRONG_BASE or "exp(" in kernel.header + kernel.body, f"{op} does not call exp any more"
    text = (start + kernel.body, header + kernel.header)
    monkeypatch.setattr(module, name, PortableKernel(kernel.name, kernel.inputs, kernel.outputs, *text))
