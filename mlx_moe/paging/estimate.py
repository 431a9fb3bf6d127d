"""What a memory plan may give in speed, by arithmetic alone: an estimate until it is measured on the machine.

A token reads the dense weights, its experts and its states from memory, what misses from the SSD, and waits once per
layer for the ids of its experts. Knows no MLX, no file and no machine.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from mlx_moe.config import LINEAR
from mlx_moe.paging.device import PassTime, PassWork, Speeds, pass_time
from mlx_moe.paging.plan import MemoryPlan
from mlx_moe.paging.sizes import state_bytes

LRU_CURVE = ((0, 0.0), (93, 0.435), (186, 0.62), (279, 0.72), (372, 0.789), (512, 0.85))
"""Slots of 512 per layer and the hit rate of LRU: replay of one run of 300 tokens on Qwen3.8-Flash-Next that started
with nothing in memory, true routing. Straight lines between the points; another model's routing may differ."""
CURVE_EXPERTS = 512
PROMPT_TOKENS = 10_000
STEPS = (2048, 4096, 8192)


@dataclass(frozen=True)
class Prefill:
    """Reads of ``PROMPT_TOKENS`` in pieces of ``step``: every expert once per piece. Computing comes on top."""

    step: int
    pieces: int
    read_bytes: int
    read_s: float


@dataclass(frozen=True)
class Expectation:
    """Of one token: hit rate, bytes from the SSD with nothing in memory and as expected, and seconds by cause."""

    hit_rate: float
    cold_bytes: int
    read_bytes: int
    dense_s: float
    experts_s: float
    states_s: float
    misses_s: float
    waits_s: float
    prefill: tuple[Prefill, ...]

    @property
    def token_s(self) -> float:
        """Without any overlap of disk and device."""
        return self._time.serial_s

    @property
    def overlapped_s(self) -> float:
        """The least: the shorter of disk and device hidden behind the longer."""
        return self._time.overlapped_s

    @property
    def _time(self) -> PassTime:
        terms = self.dense_s, self.experts_s, self.states_s, self.waits_s
        return PassTime(*terms, host_s=0.0, misses_s=self.misses_s, ahead_s=0.0, tokens=1.0)


def hit_rate(slots: int, experts: int) -> float:
    """Of LRU with so many slots per layer, from the curve; 1 when all experts are in memory."""
    if slots >= experts:
        return 1.0
    at = slots * CURVE_EXPERTS / experts
    i = bisect.bisect_right([point for point, _ in LRU_CURVE], at)
    (x0, y0), (x1, y1) = LRU_CURVE[i - 1], LRU_CURVE[i]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def expect(plan: MemoryPlan, speeds: Speeds) -> Expectation:
    """What the plan may give on a machine of these speeds, for one token at a time, true routing, no drafts."""
    sizes, config = plan.sizes, plan.sizes.config
    rate = hit_rate(plan.slots, config.num_experts)
    missed = int((1 - rate) * sizes.token_expert_bytes)
    streams = rate < 1
    read_bytes = missed + sizes.row_bytes
    work = PassWork(
        dense_bytes=sizes.dense_token_bytes,
        expert_bytes=sizes.token_expert_bytes,
        state_bytes=carried_bytes(plan),
        waits=streams * config.num_hidden_layers,
        demanded={(1, read_bytes): 1},
    )
    time = pass_time(work, speeds)
    return Expectation(
        hit_rate=rate,
        cold_bytes=sizes.token_expert_bytes + sizes.row_bytes,
        read_bytes=read_bytes,
        dense_s=time.dense_s,
        experts_s=time.experts_s,
        states_s=time.states_s,
        misses_s=time.misses_s,
        waits_s=time.waits_s,
        prefill=tuple(_prefill(step, streams * sizes.expert_bytes, speeds) for step in STEPS),
    )


def carried_bytes(plan: MemoryPlan) -> int:
    """What a token at the end of the context reads and writes of states, and reads of keys."""
    config, item = plan.sizes.config, plan.wanted.item_bytes
    attention = config.num_hidden_layers - config.layer_types.count(LINEAR)
    seen = min(plan.wanted.context, config.indexer_budget + config.indexer_compress_ratio - 1)
    keys = 2 * config.num_key_value_heads * config.head_dim * seen
    index = config.indexer_head_dim * (plan.wanted.context // config.indexer_compress_ratio)
    return 2 * state_bytes(config, item) + attention * (keys + index) * item


def _prefill(step: int, piece_bytes: int, speeds: Speeds) -> Prefill:
    pieces = -(-PROMPT_TOKENS // step)
    return Prefill(step, pieces, pieces * piece_bytes, pieces * piece_bytes / speeds.ssd_bytes_s)
