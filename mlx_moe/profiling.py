"""Where the time of a token goes: the host, waiting for the device, waiting for the disk."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from mlx_moe.models.qwen4_exp import Model
from mlx_moe.paging.waits import Waits


@dataclass(frozen=True)
class Profile:
    """Milliseconds per token, the mean of ``tokens``: those of a text after its first.

    Attributes:
        token_ms: of the whole, and the sum of the others.
        host_ms: building graphs, bookkeeping, and what the caller does with a token.
        device_ms: waiting for the device.
        disk_ms: waiting for reads.
    """

    tokens: int
    token_ms: float
    host_ms: float
    device_ms: float
    disk_ms: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"Token: {self.token_ms:.2f} ms = host {self.host_ms:.2f} + device {self.device_ms:.2f}"
            f" + disk {self.disk_ms:.2f}, mean of {self.tokens}"
        )


class Profiler:
    """Reads the clocks of a model that generates one text."""

    def __init__(self, model: Model, waits: Waits) -> None:
        """waits: of the loop over tokens; those of streaming are in the model's statistics."""
        self._model, self._waits = model, waits
        self.start()

    def start(self) -> None:
        """The first token is there."""
        self._begin = self._now()

    def profile(self, tokens: int) -> Profile | None:
        """Of ``tokens`` since the start; None without any."""
        if not tokens:
            return None
        spent, device, disk = (1e3 * (now - then) / tokens for now, then in zip(self._now(), self._begin, strict=True))
        return Profile(tokens, spent, spent - device - disk, device, disk)

    def _now(self) -> tuple[float, float, float]:
        """Seconds: of the clock, waited for the device, waited for reads."""
        device, disk, stats = self._waits.device_s, self._waits.disk_s, self._model.experts_stats
        if stats is not None:
            device, disk = device + stats.device_wait_ms / 1e3, disk + stats.demanded_wait_ms / 1e3
        return time.perf_counter(), device, disk
