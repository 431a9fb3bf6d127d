"""What a pass costs on a machine, by arithmetic alone: bytes at their rates, waits at their price, reads by the SSD's
curve. One place for ``mlx-moe plan`` and for replays of recorded routing. Knows no MLX, no model and no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WAIT_US = 190.0
"""A passive wait on the device on Apple's GPUs, until ``mlx-moe doctor`` has measured it."""
READS_AT_ONCE = 8
"""Records under way at once, as many as the reader has threads."""


@dataclass(frozen=True)
class Speeds:
    """Of a machine.

    Attributes:
        ssd_bytes_s, memory_bytes_s: bytes per second with enough of them under way.
        wait_s: one wait of the host on the device.
        ssd_half_bytes: so many bytes under way give half of the SSD's rate; 0 is the full rate always.
        host_s: what the host takes beside the device in a pass.
    """

    ssd_bytes_s: float
    memory_bytes_s: float
    wait_s: float = WAIT_US / 1e6
    ssd_half_bytes: float = 0.0
    host_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.ssd_bytes_s, self.memory_bytes_s) <= 0 or min(self.wait_s, self.ssd_half_bytes, self.host_s) < 0:
            raise ValueError("speeds of SSD and memory must be above 0, the price of a wait 0 or more")

    def read_s(self, count: float, record_bytes: int) -> float:
        """Seconds for records that are asked for together and waited for.

        The rate with q bytes under way is ssd_bytes_s * q / (q + ssd_half_bytes).
        """
        if not count * record_bytes:
            return 0.0
        under_way = min(count, READS_AT_ONCE) * record_bytes
        return count * record_bytes * (under_way + self.ssd_half_bytes) / (under_way * self.ssd_bytes_s)


@dataclass(frozen=True)
class PassWork:
    """What one pass does, on average over passes.

    Attributes:
        dense_bytes, expert_bytes, state_bytes: read from memory, and written where states change.
        waits: of the host on the device.
        demanded: (records, bytes of each) that are asked for together and waited for: how often.
        ahead_bytes: read from the SSD before they are needed, or in vain; with the SSD's queue full.
        tokens: that a pass gives.
        drafts: what making its drafts takes, if there are any.
    """

    dense_bytes: float
    expert_bytes: float
    state_bytes: float
    waits: float
    demanded: Mapping[tuple[float, int], float] = field(default_factory=dict)
    ahead_bytes: float = 0.0
    tokens: float = 1.0
    drafts: PassWork | None = None

    @property
    def read_bytes(self) -> float:
        """From the SSD."""
        own = self.ahead_bytes + sum(often * count * size for (count, size), often in self.demanded.items())
        return own + (self.drafts.read_bytes if self.drafts else 0)


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass by cause; those of drafts apart."""

    dense_s: float
    experts_s: float
    states_s: float
    waits_s: float
    host_s: float
    misses_s: float
    ahead_s: float
    tokens: float
    drafts: PassTime | None = None

    @property
    def device_s(self) -> float:
        """All but the SSD."""
        own = self.dense_s + self.experts_s + self.states_s + self.waits_s + self.host_s
        return own + (self.drafts.device_s if self.drafts else 0)

    @property
    def ssd_s(self) -> float:
        """Of reads."""
        return self.misses_s + self.ahead_s + (self.drafts.ssd_s if self.drafts else 0)

    @property
    def serial_s(self) -> float:
        """Without any overlap of SSD and device."""
        return self.device_s + self.ssd_s

    @property
    def overlapped_s(self) -> float:
        """The least: the shorter of SSD and device hidden behind the longer."""
        return max(self.device_s, self.ssd_s)

    @property
    def tokens_s(self) -> tuple[float, float]:
        """Tokens per second without any overlap, and with all of it."""
        return self.tokens / self.serial_s, self.tokens / self.overlapped_s


def pass_time(work: PassWork, speeds: Speeds) -> PassTime:
    """What a pass takes on a machine of these speeds."""
    return PassTime(
        dense_s=work.dense_bytes / speeds.memory_bytes_s,
        experts_s=work.expert_bytes / speeds.memory_bytes_s,
        states_s=work.state_bytes / speeds.memory_bytes_s,
        waits_s=work.waits * speeds.wait_s,
        host_s=speeds.host_s,
        misses_s=sum(often * speeds.read_s(*batch) for batch, often in work.demanded.items()),
        ahead_s=work.ahead_bytes / speeds.ssd_bytes_s,
        tokens=work.tokens,
        drafts=None if work.drafts is None else pass_time(work.drafts, _beside(speeds)),
    )


def _beside(speeds: Speeds) -> Speeds:
    """Of drafts, whose host time is in that of the pass."""
    return Speeds(speeds.ssd_bytes_s, speeds.memory_bytes_s, speeds.wait_s, speeds.ssd_half_bytes)
