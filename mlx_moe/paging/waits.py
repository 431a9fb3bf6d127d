"""For how long a computing thread waited, and for what. Knows no MLX."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np


class Waits:
    """Seconds since it was made; only the thread that computes may use it.

    Attributes:
        device_s: for values that the device computes.
        disk_s: for reads.
    """

    def __init__(self) -> None:
        self.device_s = self.disk_s = 0.0

    def on_device(self) -> AbstractContextManager[None]:
        """What happens in it waits for the device."""
        return self._counted("device_s")

    def on_disk(self) -> AbstractContextManager[None]:
        """What happens in it waits for reads."""
        return self._counted("disk_s")

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def values(self, array: Any) -> np.ndarray:
        """An array of MLX in NumPy, once the device has computed it."""
        with self.on_device():
            return np.array(array)
