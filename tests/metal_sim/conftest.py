"""What the simulator's own tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from metal_sim import verify

INDEX = "uint i = thread_position_in_grid.x; uint l = thread_position_in_threadgroup.x; "
SIZE = 256


@pytest.fixture
def run_body() -> Callable[..., list[mx.array]]:
    """Verify a kernel given as one line of text: `x` [256] float32 -> `o` [256], two threadgroups of 128 threads.

    The body finds `i` (thread in the grid), `l` (thread in the threadgroup) and `T` (the input's type) defined.
    """

    def run(
        body: str, header: str = "", *, dtype: mx.Dtype = mx.float32, table: int = 0, **call: Any
    ) -> list[mx.array]:
        inputs = [mx.arange(SIZE).astype(dtype)]
        if table:
            inputs.append(mx.arange(table).astype(dtype))  # of fewer than 8 elements: Metal's constant space
        kernel = mx.fast.metal_kernel(
            name="sample",
            input_names=["x", "table"][: len(inputs)],
            output_names=["o"],
            source=INDEX + body,
            header=header,
        )
        launch = dict(
            inputs=inputs,
            template=[("T", dtype)],
            grid=(SIZE, 1, 1),
            threadgroup=(128, 1, 1),
            output_shapes=[(SIZE,)],
            output_dtypes=[dtype],
        )
        return verify(kernel, **{**launch, **call})

    return run
