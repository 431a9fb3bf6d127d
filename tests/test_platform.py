"""MLX's limits follow the plans of the models that are open, and come back with the last one."""

from __future__ import annotations

import gc
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moe import load_model, platform
from mlx_moe.paging.budget import Paging
from mlx_moe.platform import CONSTANT_BYTES, CPU_CACHE_BYTES, Device, MemoryLimits, taken_bytes, wired_memory
from mlx_moe.runtime import DEMO
from mlx_moe.streaming import plan_model

BEFORE = {"memory": 900, "cache": 800, "wired": 7}


@pytest.fixture
def limits(monkeypatch):
    """What stands in MLX, where Metal recommends 1000 bytes."""
    now = dict(BEFORE)

    def setter(name):
        def set_limit(value):
            earlier, now[name] = now[name], value
            return earlier

        return set_limit

    for name in now:
        monkeypatch.setattr(mx, f"set_{name}_limit", setter(name))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(platform, "device", lambda: Device("Mac", "g17", 2000, 1000))
    monkeypatch.setattr(MemoryLimits, "_held", {})
    monkeypatch.setattr(MemoryLimits, "_earlier", None)
    return now


def test_limits_of_one_model(limits):
    held = MemoryLimits(300, 50)
    held.hold(200)
    assert limits == {"memory": 500, "cache": 50, "wired": 500}
    held.hold(900)
    assert limits == {"memory": 1200, "cache": 50, "wired": 1000}, "no more is wired than Metal recommends"
    held.release()
    held.release()
    assert limits == BEFORE


def test_limits_of_two_models(limits):
    """They add up, and whoever goes last brings back what was there before."""
    first, second = MemoryLimits(300, 50), MemoryLimits(100, 60)
    first.hold(100)
    second.hold(200)
    assert limits == {"memory": 700, "cache": 60, "wired": 700}
    first.release()
    assert limits == {"memory": 300, "cache": 60, "wired": 300}
    second.release()
    assert limits == BEFORE


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_limits_come_back_in_any_order(limits, order):
    held = [MemoryLimits(300, 50), MemoryLimits(100, 60), MemoryLimits(10, 70)]
    for i, one in enumerate(held):
        one.hold(100 * i)
    for i in order:
        assert limits != BEFORE
        held[i].release()
    assert limits == BEFORE


def test_what_other_models_take(limits, monkeypatch):
    """Their plans, or the arrays there are and what those models will still need; constants are no model."""
    active = [0]
    monkeypatch.setattr(mx, "get_active_memory", lambda: active[0])
    assert taken_bytes() == 0
    first, second = MemoryLimits(300, 50, spare_bytes=100), MemoryLimits(200, 50, spare_bytes=20)
    first.hold(1000)
    second.hold(0)
    assert MemoryLimits.held_bytes() == (1500, 120) and taken_bytes() == 1500
    for active[0], want in ((CONSTANT_BYTES, 1500), (CONSTANT_BYTES + 1300, 1500), (CONSTANT_BYTES + 5000, 5120)):
        assert taken_bytes() == want
    first.release()
    second.release()
    assert taken_bytes() == 5000, "of models that are no plan's"
    active[0] = CONSTANT_BYTES
    assert taken_bytes() == 0


def test_without_metal_nothing_is_wired(limits, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    held = MemoryLimits(300, 50)
    held.hold(200)
    assert limits == {"memory": 500, "cache": 50, "wired": 7}
    held.release()
    assert limits == BEFORE


def test_generation_keeps_the_limits_of_plans(limits, monkeypatch):
    monkeypatch.setattr(platform, "maybe_set_recommended_wired_limit", lambda: mx.set_wired_limit(1000))
    with wired_memory():
        assert limits["wired"] == 1000
    held = MemoryLimits(300, 50)
    held.hold(0)
    with wired_memory():
        assert limits["wired"] == 300
    held.release()
    assert limits == BEFORE


@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_a_model_holds_limits_until_its_end(limits, monkeypatch, end):
    monkeypatch.undo()
    gc.collect()
    earlier = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 39)
    try:
        monkeypatch.setattr(MemoryLimits, "_held", {})
        monkeypatch.setattr(MemoryLimits, "_earlier", None)
        model, _ = load_model(DEMO, mx.float32, expert_slots=8)
        plan = plan_model(DEMO, model.config, mx.float32, "auto", Paging(expert_slots=8))
        most = CPU_CACHE_BYTES if mx.default_device() == mx.Device(mx.cpu) else plan.workspace_bytes
        assert _limits() == pytest.approx((plan.gpu_bytes, min(plan.workspace_bytes, most)), abs=1 << 20)
        model.resize_experts(12)
        assert _limits()[0] == pytest.approx(plan.gpu_bytes + 4 * plan.sizes.slot_bytes, abs=1 << 20)
        if end == "closed":
            model.close()
        del model
        gc.collect()
        assert _limits() == (1 << 40, 1 << 39)
    finally:
        mx.set_memory_limit(earlier[0])
        mx.set_cache_limit(earlier[1])


@pytest.mark.parametrize("last", [0, 1])
def test_two_models_end_where_mlx_was(monkeypatch, last):
    """Whoever is closed last; and a third one after them."""
    gc.collect()
    earlier = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 39)
    try:
        monkeypatch.setattr(MemoryLimits, "_held", {})
        monkeypatch.setattr(MemoryLimits, "_earlier", None)
        models = [load_model(DEMO, mx.float32, expert_slots=slots)[0] for slots in (8, 6)]
        models[1 - last].close()
        assert _limits() != (1 << 40, 1 << 39)
        models[last].resize_experts(10)
        models[last].close()
        assert _limits() == (1 << 40, 1 << 39)
        with load_model(DEMO, mx.float32, expert_slots=6)[0]:
            assert _limits()[0] < 1 << 40
        assert _limits() == (1 << 40, 1 << 39)
    finally:
        mx.set_memory_limit(earlier[0])
        mx.set_cache_limit(earlier[1])


def _limits() -> tuple[int, int]:
    """Of memory and cache; stays as it is."""
    memory, cache = mx.set_memory_limit(0), mx.set_cache_limit(0)
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)
    return memory, cache


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  39 kB\n", True),
        ("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  41 kB\n", False),
        ("MemTotal:  1000 kB\n", False),
        ("nonsense", False),
    ],
)
def test_pressure_on_linux(monkeypatch, text, want):
    monkeypatch.setattr(platform.sys, "platform", "linux")
    monkeypatch.setattr(Path, "read_text", lambda self: text if str(self) == "/proc/meminfo" else "")
    assert platform.under_pressure() is want


@pytest.mark.parametrize(("level", "failed", "want"), [(1, 0, False), (2, 0, True), (4, 0, True), (4, -1, False)])
def test_pressure_on_macos(monkeypatch, level, failed, want):
    class Library:
        def __init__(self, name):
            assert name is None

        def sysctlbyname(self, name, value, size, new, length):
            assert name == b"kern.memorystatus_vm_pressure_level"
            value._obj.value = level
            return failed

    monkeypatch.setattr(platform.sys, "platform", "darwin")
    monkeypatch.setattr(platform.ctypes, "CDLL", Library)
    assert platform.under_pressure() is want
