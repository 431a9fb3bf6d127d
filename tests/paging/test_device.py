"""The price of a pass: the SSD's curve, every term, drafts."""

from __future__ import annotations

import dataclasses

import pytest

from mlx_moe.machines import MACHINES, SSD_HALF_BYTES
from mlx_moe.paging.device import PassWork, Speeds, pass_time

SPEEDS = Speeds(5e9, 100e9, 100e-6, 1e6, 2e-3)
WORK = PassWork(3e9, 7e8, 2e8, 48, {(3, 1_000_000): 10.0, (20, 2_000_000): 1.0}, 5e7, 2.5)


def test_the_curve_of_reads():
    """Half of the rate with a megabyte under way, no more than eight records under way, all of it without a curve."""
    assert SPEEDS.read_s(1, 1_000_000) == pytest.approx(2 * 1e6 / 5e9)
    assert SPEEDS.read_s(8, 1_000_000) == pytest.approx(9e6 / 5e9)
    assert SPEEDS.read_s(80, 1_000_000) == pytest.approx(10 * SPEEDS.read_s(8, 1_000_000))
    assert SPEEDS.read_s(0, 1_000_000) == SPEEDS.read_s(3, 0) == 0
    assert dataclasses.replace(SPEEDS, ssd_half_bytes=0).read_s(1, 1000) == 1000 / 5e9


def test_the_observation_behind_the_presets():
    """Records of 2.8 MB one at a time come half as fast as eight at a time."""
    speeds = MACHINES["m5-air-24"].speeds()
    assert speeds.ssd_half_bytes == SSD_HALF_BYTES
    assert 8 * speeds.read_s(1, 2_800_000) == pytest.approx(2 * speeds.read_s(8, 2_800_000), rel=1e-3)


def test_the_terms():
    """By hand."""
    found = pass_time(WORK, SPEEDS)
    assert (found.dense_s, found.experts_s, found.states_s) == (0.03, 0.007, 0.002)
    assert found.waits_s == pytest.approx(4.8e-3) and found.host_s == 2e-3 and found.ahead_s == 0.01
    assert found.misses_s == pytest.approx(10 * 4e6 / 5e9 + 40e6 / 5e9 * 17 / 16)
    assert WORK.read_bytes == 30e6 + 40e6 + 5e7
    device = 0.03 + 0.007 + 0.002 + 4.8e-3 + 2e-3
    ssd = found.misses_s + 0.01
    assert found.serial_s == pytest.approx(device + ssd) and found.overlapped_s == pytest.approx(max(device, ssd))
    assert found.tokens_s == pytest.approx((2.5 / (device + ssd), 2.5 / max(device, ssd)))


def test_drafts_come_on_top_and_take_no_host_of_their_own():
    drafts = PassWork(1e8, 0, 0, 2, {(1, 1_000_000): 2})
    found = pass_time(dataclasses.replace(WORK, drafts=drafts), SPEEDS)
    alone = pass_time(WORK, SPEEDS)
    assert found.device_s - alone.device_s == pytest.approx(1e-3 + 2e-4)
    assert found.ssd_s - alone.ssd_s == pytest.approx(2 * 2e6 / 5e9)
    assert dataclasses.replace(WORK, drafts=drafts).read_bytes == WORK.read_bytes + 2e6


@pytest.mark.parametrize("change", [{"ssd_half_bytes": -1}, {"host_s": -1e-9}, {"wait_s": -1}, {"memory_bytes_s": 0}])
def test_speeds_that_cannot_be(change):
    with pytest.raises(ValueError, match="above 0, the price of a wait 0 or more"):
        dataclasses.replace(SPEEDS, **change)
