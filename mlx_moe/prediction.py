"""What the published model may give on a machine: replays of made-up routing, priced by the machine's figures.

A prediction and no measurement: neither the routing (``paging.synthetic``) nor any speed was measured here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_moe.machines import Preset
from mlx_moe.paging.device import PassTime, PassWork, pass_time
from mlx_moe.paging.drafts import MTP_ACCEPTANCE, draft_windows
from mlx_moe.paging.estimate import carried_bytes
from mlx_moe.paging.moce import MoceConfig
from mlx_moe.paging.plan import Machine, MemoryPlan, Wanted, plan_memory
from mlx_moe.paging.replay import ReplayResult, ReplaySettings, replay
from mlx_moe.paging.synthetic import synthetic_trace
from mlx_moe.paging.trace import Trace
from mlx_moe.published import DENSE_BITS, DRAFT_WEIGHTS, HEAD_WEIGHTS, mean_record_bytes, published_sizes

ROUTERS: dict[str, MoceConfig | None] = {
    "exact": None,
    "MoCE, default": MoceConfig(),
    "MoCE 0.85/3": MoceConfig(bonus=0.85, keep_top=3, max_rank=None),
}
WAITS_US = (190.0, 60.0)
SLOTS = 86
SIMULATED_LAYERS = 8
"""Of the model's 48, since made-up layers are alike."""


@dataclass(frozen=True)
class Prediction:
    """One setting. times: of one pass, for each price of a wait."""

    dense: str
    slots: int
    router: str
    drafts: int
    result: ReplayResult
    work: PassWork
    times: dict[float, PassTime]

    @property
    def read_bytes_per_token(self) -> float:
        """From the SSD, drafts' reads among them."""
        return self.work.read_bytes / self.work.tokens

    def as_dict(self) -> dict[str, Any]:
        """For JSON: shares, bytes, and for each wait seconds of a pass by cause."""
        out = {name: getattr(self, name) for name in ("dense", "slots", "router", "drafts", "read_bytes_per_token")}
        out |= {"hit_rate": self.result.hit_rate, "substituted": self.result.substituted_share}
        out |= {"relative_error": self.result.relative_error, "tokens_per_pass": self.work.tokens}
        return out | {"waits_us": {str(wait): terms(time) for wait, time in self.times.items()}}


def terms(time: PassTime) -> dict[str, float]:
    """Seconds of a pass by cause, and tokens per second without overlap of SSD and device and with all of it."""
    names = ("dense_s", "experts_s", "states_s", "waits_s", "host_s", "misses_s", "ahead_s")
    serial, overlapped = time.tokens_s
    drafts = 0.0 if time.drafts is None else time.drafts.serial_s
    found = {name: getattr(time, name) for name in names} | {"drafts_s": drafts}
    return found | {"tokens_s": serial, "tokens_s_overlapped": overlapped}


def predictions(
    machine: Preset,
    read_ahead: bool = False,
    acceptance: Sequence[float] = MTP_ACCEPTANCE,
    waits_us: Sequence[float] = WAITS_US,
    seed: int = 0,
) -> Iterator[Prediction]:
    """The published model on a machine: bits per dense weight, slots, routers, without and with drafts.

    Slots are SLOTS, and what the memory plan gives for the default context.
    """
    plain = synthetic_trace(SIMULATED_LAYERS, (mean_record_bytes(),) * SIMULATED_LAYERS, seed=seed)
    traces = {0: plain, len(acceptance): draft_windows(plain, acceptance, seed)}
    known: dict[tuple[int, str, int], ReplayResult] = {}
    for dense, bits in DENSE_BITS.items():
        for planned in (False, True):
            for router in ROUTERS:
                for drafts in traces:
                    plan = _plan(machine, bits, drafts > 0, None if planned else SLOTS)
                    key = plan.slots, router, drafts
                    if key not in known:
                        known[key] = _replayed(traces[drafts], plan.slots, router, read_ahead)
                    yield _priced(machine, dense, router, drafts, plan, known[key], waits_us)


def prediction_table(machine: Preset, rows: Sequence[Prediction]) -> Iterator[str]:
    """Markdown: every term in ms of a pass, MB from the SSD per token, and tokens per second.

    The latter stand as "without overlap of SSD and device – with all of it".
    """
    waits = list(rows[0].times)
    yield f"{machine.title}: SSD {machine.ssd_gb_s:g} GB/s at most, memory {machine.memory_gb_s:g} GB/s."
    yield ""
    head = ["dense", "slots", "router", "drafts", "hits", "subst.", "rMSE", "tok/pass", "MB/tok"]
    head += ["dense ms", "experts", "states", "host", "drafts", "SSD"]
    head += [f"waits {wait:g} µs" for wait in waits] + [f"tok/s {wait:g} µs" for wait in waits]
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * 4 + "---:|" * (len(head) - 4)
    for row in rows:
        yield "| " + " | ".join(_cells(row, waits)) + " |"


def _cells(row: Prediction, waits: Sequence[float]) -> Iterator[str]:
    time, result = row.times[waits[0]], row.result
    yield from (row.dense, str(row.slots), row.router, str(row.drafts or "–"), f"{100 * result.hit_rate:.0f} %")
    yield f"{100 * result.substituted_share:.0f} %" if result.norm else "–"
    yield f"{result.relative_error:.2f}" if result.norm else "–"
    yield f"{row.work.tokens:.2f}"
    yield f"{row.read_bytes_per_token / 1e6:.0f}"
    drafts = 0.0 if time.drafts is None else time.drafts.serial_s - time.drafts.waits_s
    for seconds in (time.dense_s, time.experts_s, time.states_s, time.host_s, drafts, time.misses_s + time.ahead_s):
        yield f"{1e3 * seconds:.1f}"
    for wait in waits:
        found = row.times[wait]
        yield f"{1e3 * (found.waits_s + (found.drafts.waits_s if found.drafts else 0)):.1f}"
    for wait in waits:
        yield "{:.1f}–{:.1f}".format(*row.times[wait].tokens_s)


def _plan(machine: Preset, bits: float, drafts: bool, slots: int | None) -> MemoryPlan:
    sizes = published_sizes(bits, drafts)
    return plan_memory(sizes, Machine.simulated(machine.memory_bytes), Wanted(expert_slots=slots))


def _replayed(trace: Trace, slots: int, router: str, read_ahead: bool) -> ReplayResult:
    return replay(trace, ReplaySettings(slots, moce=ROUTERS[router], read_ahead=read_ahead))


def _priced(
    machine: Preset,
    dense: str,
    router: str,
    drafts: int,
    plan: MemoryPlan,
    result: ReplayResult,
    waits_us: Sequence[float],
) -> Prediction:
    layers = plan.sizes.config.num_hidden_layers / SIMULATED_LAYERS
    work = result.windows.work(plan.sizes.dense_token_bytes, carried_bytes(plan), layers)
    work = replace(work, ahead_bytes=work.ahead_bytes + plan.sizes.row_bytes)
    if drafts:
        work = replace(work, drafts=_draft_work(plan, DENSE_BITS[dense], drafts, result))
    times = {wait: pass_time(work, machine.speeds(wait)) for wait in waits_us}
    return Prediction(dense, plan.slots, router, drafts, result, work, times)


def _draft_work(plan: MemoryPlan, bits: float, drafts: int, result: ReplayResult) -> PassWork:
    """Of all drafts of a pass: the draft layer and the head each time; its experts hit as the others do."""
    sizes, windows = plan.sizes, result.windows
    k, record = sizes.config.num_experts_per_tok, sizes.records[-1]
    missed = k * windows.misses / (windows.hits + windows.misses)
    return PassWork(
        dense_bytes=drafts * (DRAFT_WEIGHTS + HEAD_WEIGHTS) * bits / 8,
        expert_bytes=drafts * k * record,
        state_bytes=0,
        waits=drafts,
        demanded={(missed, record): drafts},
    )
