"""Machines by name, for plans on machines that are not at hand. Sold memory is in GiB; speeds are read speeds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A machine: its name, memory, and speeds in GB/s."""

    title: str
    memory_bytes: int
    memory_gb_s: float
    ssd_gb_s: float


# Memory speeds: Apple's specifications (M5 153, M5 Pro 307, M1 Max 400, M2 100 GB/s); a stream on the M5 Air reached
# 132. SSDs: sequential reads published with Blackmagic Disk Speed Test. M5 Air 6.5 GB/s; M5 Pro as the M5 Max with
# 4 TB (13.6, The Verge); M1 Max as the M1 Pro with 1 TB (5.8, Macworld); M2 with 512 GB 2.9 (with 256 GB 1.45).
# Records of 1 to 3 MB reach these rates only with several reads in flight.
MACHINES = {
    "m5-air-24": Preset("M5 Air, 24 GB", 24 << 30, 132.0, 6.5),
    "m5-pro-48": Preset("M5 Pro, 48 GB", 48 << 30, 307.0, 13.6),
    "m1-max-32": Preset("M1 Max, 32 GB", 32 << 30, 400.0, 5.8),
    "m2-16": Preset("M2, 16 GB", 16 << 30, 100.0, 2.9),
}
UNKNOWN = MACHINES["m2-16"]
"""Whose speeds are taken for a machine that nothing is known of: the slowest."""
