"""What other threads and processes do takes a while."""

from __future__ import annotations

import time
from collections.abc import Callable


def soon(reached: Callable[[], object]) -> bool:
    """Whether it is so within some seconds."""
    return any(reached() or time.sleep(0.005) for _ in range(1000))
