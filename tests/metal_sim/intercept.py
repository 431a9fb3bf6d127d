"""Runs kernels that other code launches: inside `metal_on_cpu`, every Metal kernel goes to the simulator."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import mlx.core as mx

from .api import verify


@contextlib.contextmanager
def metal_on_cpu(**options: Any) -> Iterator[list[str]]:
    """Make Metal look available and verify each kernel launch on the simulator.

    Only kernels built inside are caught: where a module builds them at import, use `load_copy`. `options` go to
    `verify`. Yields the list of kernel names launched so far.
    """
    build = mx.fast.metal_kernel
    launched: list[str] = []

    def metal_kernel(name: str, *args: Any, **kwargs: Any) -> Callable[..., list[mx.array]]:
        kernel = build(name, *args, **kwargs)

        def launch(*, stream: Any = None, verbose: bool = False, **call: Any) -> list[mx.array]:
            launched.append(name)
            return verify(kernel, **call, **options)

        return launch

    with (
        mock.patch.object(mx.fast, "metal_kernel", metal_kernel),
        mock.patch.object(mx.metal, "is_available", lambda: True),
    ):
        yield launched


def load_copy(name: str) -> ModuleType:
    """Import a module once more beside the one in `sys.modules`, which stays as it is.

    Inside `metal_on_cpu` the copy's kernels run on the simulator, and no other test sees them.
    """
    original = importlib.util.find_spec(name)
    if original is None or original.origin is None:
        raise ModuleNotFoundError(name)
    package, _, last = name.rpartition(".")
    alias = f"{package}._metal_sim_{last}"  # inside the package, so that relative imports work
    spec = importlib.util.spec_from_file_location(alias, original.origin)
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[alias]
    return module
