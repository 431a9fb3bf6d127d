"""MLX's limits follow the plans of the models that are open, and come back with the last one."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from mlx_moe import load_model, platform
from mlx_moe.paging.budget import Paging
from mlx_moe.platform import Device, MemoryLimits, wired_memory
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
        assert _limits() == pytest.approx((plan.gpu_bytes, plan.workspace_bytes), abs=1 << 20)
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


def _limits() -> tuple[int, int]:
    """Of memory and cache; stays as it is."""
    memory, cache = mx.set_memory_limit(0), mx.set_cache_limit(0)
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)
    return memory, cache
