"""Several settings of routing in one batch: every row as if it streamed alone, while all experts stand in memory.

Row b of a batch routes by what would stand in its memory, with its own preference for that, and places, evictions and
counters follow from its own picks. So one pass does the work of a run per setting, and gives what those runs would
give with read-ahead off. Nothing is read; nothing waits but the host, one pass later, for ids that are long there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from custom_kernels.dequant_gemv import expert_combine
from custom_kernels.dispatch import choose
from custom_kernels.moce_route import RowPolicies, route_rows
from mlx_moe.config import ModelConfig
from mlx_moe.models.layers import gather_mm
from mlx_moe.paging.experts import ArenaExperts
from mlx_moe.paging.moce import MoceConfig
from mlx_moe.paging.policy import LayerPolicy
from mlx_moe.paging.routing import divergences
from mlx_moe.paging.statistics import ExpertStats

UNPACKED_BYTES = 1 << 30
"""Of all experts as float32, up to which they are unpacked once where no kernel reads packed ones."""


class _Step(NamedTuple):
    """What a layer decided in a pass, perhaps not computed yet."""

    number: int  # of the pass
    ids: mx.array  # [B, k] uint32
    substituted: mx.array  # [B] uint32
    kl: mx.array  # [B] float32


class _Places:
    """What would stand in memory for each row of one layer, and what that row's runs would have counted."""

    def __init__(self, rows: int, experts: int, slots: int) -> None:
        self.policies = [LayerPolicy(slots) for _ in range(rows)]
        self.resident = np.zeros((rows, experts), dtype=np.bool_)
        self.picks = 0  # of each row
        self.substituted, self.kl = np.zeros(rows, dtype=np.int64), np.zeros(rows)

    def take(self, step: _Step) -> None:
        """Count a pass of one token per row and move experts as the pager does: all that miss come in one wave."""
        ids = np.array(step.ids)
        self.picks += ids.shape[1]
        self.substituted += np.array(step.substituted)
        self.kl += np.array(step.kl)
        for policy, row, needed in zip(self.policies, self.resident, ids.tolist(), strict=True):
            for expert, _, evicted in policy.admit(policy.use(needed)):
                if evicted is not None:
                    row[evicted] = False
                row[expert] = True
                policy.show(expert)
            policy.touch(needed)
            policy.release()


class _Unpacked:
    """Experts as float32 matrices, made once per layer when it is first used: references unpack at every call.

    Its products are the references', one token and expert at a time, from matrices that lie the other way round. On
    x86-64 CPUs the bits are the same.
    """

    def __init__(self, experts: ArenaExperts) -> None:
        self._experts = experts
        self._layers: dict[int, tuple[mx.array, mx.array]] = {}

    def run(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array, shared: mx.array) -> mx.array:
        """See ArenaExperts.run."""
        if layer not in self._layers:
            self._layers[layer] = self._unpack(layer)
        gate_up, down = self._layers[layer]
        gate, up = mx.split(gather_mm(x.astype(mx.float32)[:, None, None], gate_up, ids, False), 2, axis=-1)
        partials = gather_mm(gate * mx.sigmoid(gate) * up, down, ids, False)[:, :, 0]
        return expert_combine(partials, weights, shared, x.dtype)

    def _unpack(self, layer: int) -> tuple[mx.array, mx.array]:
        """[E, in, 2 I], gate first, and [E, I, out]: rows of inputs, which products of one row read in order."""
        gate, up, down = (matrix.swapaxes(-1, -2) for matrix in self._experts.unpacked(layer))
        found = mx.concatenate([gate, up], axis=-1), mx.contiguous(down)
        mx.eval(found)
        return found


class SimulatedExperts:
    """An expert source (models.qwen4_exp.sources.ExpertSource) for passes of one token per row; row b has setting b.

    A pass that was interrupted, or whose token was rejected, leaves no trace. Experts that came into memory stay from
    one sequence to the next.
    """

    def __init__(
        self, experts: ArenaExperts, config: ModelConfig, settings: Sequence[MoceConfig | None], slots: int
    ) -> None:
        """Start with empty memory.

        Args:
            experts: all in memory.
            config: of the model.
            settings: of the rows; None is the exact router.
            slots: experts per layer that the simulated memory holds.

        Raises ValueError where experts stream, or slots or a setting do not suit the model.
        """
        self._top_k, self._normalize = config.num_experts_per_tok, config.norm_topk_prob
        fewest = min(count for count, _ in experts.records)
        if experts.streams:
            raise ValueError("settings are simulated beside each other only with all experts in memory")
        if not self._top_k <= slots < fewest:
            text = f"{self._top_k}, as a token uses, to {fewest - 1}, since a layer has {fewest} experts"
            raise ValueError(f"{slots} simulated slots per layer; allowed: {text}")
        for setting in filter(None, settings):
            setting.check(self._top_k)
        self._experts, self._slots, self._rows = experts, slots, len(settings)
        self._policies = [self._row_policies(settings, count) for count, _ in experts.records]
        self._measured = mx.array([bool(s and s.bonus and s.measure) for s in settings])
        self._places = [_Places(self._rows, count, slots) for count, _ in experts.records]
        self._waiting: list[_Step | None] = [None] * len(self._places)
        self._number = 0  # of the pass
        self._run = _Unpacked(experts).run if self._unpacks(config) else experts.run

    @property
    def kernels(self) -> frozenset[tuple[str, str]]:
        """See ExpertSource."""
        return self._experts.kernels

    def bind(self, routers: Sequence[mx.array]) -> None:
        """Nothing is read ahead, so the routers are not needed."""

    def begin(self, window_ids: mx.array) -> None:
        """See ExpertSource. Raises ValueError unless there is one token for each setting."""
        if window_ids.shape != (self._rows, 1):
            raise ValueError(f"token ids have shape {window_ids.shape}; needed: {(self._rows, 1)}, one per setting")
        self._number += 1

    def commit(self, accepted: int) -> None:
        """See ExpertSource."""
        if not accepted:
            self.abort()

    def abort(self) -> None:
        """See ExpertSource."""
        self._waiting = [None if step and step.number == self._number else step for step in self._waiting]

    def resize(self, slots: int) -> None:
        """Refused, with a ValueError."""
        raise ValueError("simulated slots are fixed: start with another number")

    def close(self) -> None:
        """Nothing is open; the experts behind it stay."""

    def statistics(self) -> list[ExpertStats]:
        """Counters of every row since the start; waits for the last pass."""
        for layer in range(len(self._places)):
            self._settle(layer)
        return [self._row_statistics(row) for row in range(self._rows)]

    def moe(self, layer: int, x: mx.array, logits: mx.array, shared: mx.array, phase: str = "decode") -> mx.array:
        """See ExpertSource."""
        self._settle(layer)
        resident = mx.array(self._places[layer].resident)
        routing = route_rows(logits, resident, self._top_k, self._policies[layer], self._normalize)
        kl = mx.where(self._measured, divergences(logits, routing.ids), 0.0)
        mx.async_eval(routing.ids, routing.substituted, kl)  # the device has work while the rest is built
        self._waiting[layer] = _Step(self._number, routing.ids, routing.substituted, kl)
        return self._run(layer, x, routing.ids, routing.weights, shared)

    def _settle(self, layer: int) -> None:
        """Move experts by what the layer's last pass used."""
        if self._waiting[layer] is not None:
            self._places[layer].take(self._waiting[layer])
            self._waiting[layer] = None

    def _row_policies(self, settings: Sequence[MoceConfig | None], experts: int) -> RowPolicies:
        found = []
        for s in settings:
            exact = s is None or not s.bonus
            rank = None if exact else s.max_rank
            found.append((0.0, 0, self._top_k) if exact else (s.bonus, s.keep_top, experts if rank is None else rank))
        bonus, keep_top, max_rank = zip(*found, strict=True)
        return RowPolicies(mx.array(bonus), mx.array(keep_top), mx.array(max_rank))

    def _unpacks(self, config: ModelConfig) -> bool:
        weights = 3 * config.hidden_size * config.moe_intermediate_size
        size = 4 * weights * sum(count for count, _ in self._experts.records)
        used = (kernel for kernel in self._experts.kernels if kernel[0] in ("expert_gate_up", "expert_down"))
        return size <= UNPACKED_BYTES and {choose(*kernel).backend for kernel in used} == {"reference"}

    def _row_statistics(self, row: int) -> ExpertStats:
        counters = [places.policies[row].counters for places in self._places]
        sizes = (record_bytes for _, record_bytes in self._experts.records)
        return ExpertStats(
            slots=self._slots,
            layer_hits=tuple(c.hits for c in counters),
            layer_misses=tuple(c.misses for c in counters),
            evictions=sum(c.evictions for c in counters),
            ahead_useful=0,
            ahead_wasted=0,
            ahead_failed=0,
            bytes_read=sum(c.misses * size for c, size in zip(counters, sizes, strict=True)),
            demanded_wait_ms=0.0,
            device_wait_ms=0.0,
            layer_picks=tuple(places.picks for places in self._places),
            layer_substituted=tuple(int(places.substituted[row]) for places in self._places),
            layer_kl=tuple(float(places.kl[row]) for places in self._places),
        )
