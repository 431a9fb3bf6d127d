"""Machines by name, for plans on machines that are not at hand. Sold memory is in GiB; speeds are read speeds.

Sources. Memory: Apple's specifications (M5 153 GB/s, M5 Pro 307, M1 Max 400, M2 100); a stream on the M5 Air reached
132. SSDs: sequential reads published with Blackmagic Disk Speed Test: M5 Air 6.5 GB/s; M5 Pro as the M5 Max with 4 TB
(13.6, The Verge); M1 Max as the M1 Pro with 1 TB (5.8, Macworld); M2 with 512 GB 2.9 (with 256 GB 1.45). Nothing was
measured by us.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_moe.paging.device import WAIT_US, Speeds

SSD_HALF_BYTES = 3.73e6
"""Bytes under way at which an SSD reaches half of its rate. From one published observation on Macs: records of 2.8 MB
one at a time are read half as fast as eight at a time, so h = 3.73 MB where the rate goes as q / (q + h)."""
HOST_S = 3e-3
"""Of one pass, beside the device: 48 layers of about 16 dispatches at 4 µs, as MLX takes them on another machine."""


@dataclass(frozen=True)
class Preset:
    """A machine: its name, memory, and speeds in GB/s."""

    title: str
    memory_bytes: int
    memory_gb_s: float
    ssd_gb_s: float

    def speeds(self, wait_us: float = WAIT_US) -> Speeds:
        """For replays, with the SSD's curve and the host's time. wait_us: the price of one wait on the device."""
        return Speeds(self.ssd_gb_s * 1e9, self.memory_gb_s * 1e9, wait_us / 1e6, SSD_HALF_BYTES, HOST_S)


MACHINES = {
    "m5-air-24": Preset("M5 Air, 24 GB", 24 << 30, 132.0, 6.5),
    "m5-pro-48": Preset("M5 Pro, 48 GB", 48 << 30, 307.0, 13.6),
    "m1-max-32": Preset("M1 Max, 32 GB", 32 << 30, 400.0, 5.8),
    "m1-max-64": Preset("M1 Max, 64 GB", 64 << 30, 400.0, 5.8),
    "m2-16": Preset("M2, 16 GB", 16 << 30, 100.0, 2.9),
}
UNKNOWN = MACHINES["m2-16"]
"""Whose speeds are taken for a machine that nothing is known of: the slowest."""
