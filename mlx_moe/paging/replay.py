"""Replays recorded routing through residency in closed loop: what stands in memory decides what cache-aware routing
takes, and that decides what stands in memory.

The rules are the engine's own (``flow.py``, ``policy.py``, ``prompt.py``), with nothing read and nothing computed; the
order of calls is that of ``experts.py``. With the settings of the recorded run, hits, misses, evictions and read-ahead
are the engine's to the last one. With others, logits stay those of the recorded run: what a substitution would have
changed in later layers and tokens is not in it. Knows no MLX.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from custom_kernels.slots import NO_SLOT
from mlx_moe.paging.device import PassWork
from mlx_moe.paging.flow import Flow
from mlx_moe.paging.moce import MoceConfig
from mlx_moe.paging.policy import Admission, Counters, LayerPolicy
from mlx_moe.paging.prompt import AHEAD_SHARE, WINDOW_AHEAD_SHARE, PromptReads
from mlx_moe.paging.ranks import choose, mixture_error
from mlx_moe.paging.replay_policies import DecayedCounts, HeldPrompt, Pool
from mlx_moe.paging.residency import Layer, Load
from mlx_moe.paging.trace import EVICTIONS, LayerRouting, Pass, Ranked, Residency, Trace, TraceHeader
from mlx_moe.paging.usage import LayerUsage

POLICIES = (*EVICTIONS, "lfu-decay", "lru+hold", "global")


@dataclass(frozen=True)
class ReplaySettings:
    """What a recording is replayed with.

    Attributes:
        slots: per layer; at least as many as a token uses.
        policy: who leaves memory, of POLICIES; the first two are the engine's own.
        moce: prefer experts in memory in windows; None is the plain router.
        read_ahead: read what the next layer will probably need, where the recording holds guesses.
        half_life: tokens after which a use counts half, for lfu-decay.
        hold: tokens for which a prompt's experts stay, for lru+hold.
    """

    slots: int
    policy: str = "lru"
    moce: MoceConfig | None = None
    read_ahead: bool = True
    half_life: int = 128
    hold: int = 256

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; allowed: {', '.join(POLICIES)}")
        for name in ("slots", "half_life", "hold"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 1 or more")


@dataclass
class Tally:
    """Of windows alone, for the price of a token: bytes in all of them, and reads that were waited for together."""

    passes: int = 0
    tokens: int = 0
    waits: int = 0
    used_bytes: int = 0
    ahead_bytes: int = 0
    demanded: Counter[tuple[int, int]] = field(default_factory=Counter)
    hits: int = 0
    misses: int = 0

    @property
    def read_bytes(self) -> int:
        """From the SSD, before they are needed too."""
        return self.ahead_bytes + sum(often * count * size for (count, size), often in self.demanded.items())

    def work(self, dense_bytes: float, state_bytes: float, layers: float = 1.0) -> PassWork:
        """The mean pass. layers: those of the model to one of the recording. Raises ValueError without a pass."""
        if not self.passes:
            raise ValueError("the recording holds no window, so a token's time cannot be told")
        scale = layers / self.passes
        return PassWork(
            dense_bytes=dense_bytes,
            expert_bytes=self.used_bytes * scale,
            state_bytes=state_bytes,
            waits=self.waits * scale,
            demanded={batch: often * scale for batch, often in self.demanded.items()},
            ahead_bytes=self.ahead_bytes * scale,
            tokens=self.tokens / self.passes,
        )


@dataclass
class ReplayResult:
    """Counters as in ExpertStats, by layer; ``windows`` is of windows alone.

    Attributes:
        bytes_read: of experts.
        error, norm: sums over tokens of windows of what ``ranks.mixture_error`` says.
        limited: whether cache-aware routing might have promoted experts beyond the recorded ranks.
        present: experts that stand in memory at the end, by layer, the oldest first.
    """

    counters: list[Counters]
    picks: list[int]
    substituted: list[int]
    bytes_read: int = 0
    error: float = 0.0
    norm: float = 0.0
    limited: bool = False
    windows: Tally = field(default_factory=Tally)
    present: list[list[int]] = field(default_factory=list)

    @property
    def hits(self) -> int:
        """Of all layers."""
        return sum(c.hits for c in self.counters)

    @property
    def misses(self) -> int:
        """Of all layers."""
        return sum(c.misses for c in self.counters)

    @property
    def hit_rate(self) -> float | None:
        """Of all layers; None where nothing was counted."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    @property
    def substituted_share(self) -> float:
        """Of the picks of windows."""
        return sum(self.substituted) / max(1, sum(self.picks))

    @property
    def relative_error(self) -> float:
        """Routed relative squared error from mixing weights alone, as if experts' outputs were orthogonal and equally
        long (``ranks.mixture_error``)."""
        return self.error / self.norm if self.norm else 0.0


class _Simulated(Flow):
    """The flow with nothing behind it; counts what would be read."""

    def __init__(self, header: TraceHeader, settings: ReplaySettings) -> None:
        super().__init__()
        self._header, self._settings = header, settings
        self._pool: Pool | None = None
        self.bytes_read, self.tally = 0, None  # the tally of windows, while one runs
        self.restart([None] * len(header.experts))

    @property
    def counters(self) -> list[Counters]:
        """By layer."""
        return [entry.policy.counters for entry in self._layers]

    def restart(self, counters: Sequence[Counters | None], present: Sequence[Sequence[int]] | None = None) -> None:
        """Nothing stands in memory but ``present``, by layer, the oldest first, and layers that have room for all."""
        header, slots = self._header, self._settings.slots
        if self._settings.policy == "global":
            self._pool = Pool(sum(min(slots, experts) for experts in header.experts))
        layers = []
        for i, experts in enumerate(header.experts):
            entry = Layer(experts, header.record_bytes[i], list(range(experts)), None, self._usage(i))
            entry.policy = self._policy(entry, min(slots, experts))
            entry.policy.counters = counters[i] or Counters()
            layers.append(entry)
            wanted = list(present[i])[-slots:] if present else []
            if slots >= experts:
                wanted = [*sorted(set(range(experts)) - set(wanted)), *wanted]
            for admission in entry.policy.admit(wanted):
                entry.show(admission.expert)
            entry.policy.touch(wanted)
        self._layers = layers

    def _usage(self, layer: int) -> LayerUsage | None:
        """What a layer learns with; a restart, as after a resize, forgets nothing."""
        if self._settings.policy != "frequency":
            return None
        if self._layers:
            return self._layers[layer].usage
        header = self._header
        start = None if header.start_counts is None else np.array(header.start_counts[layer])
        return LayerUsage(header.experts[layer], start, header.top_k)

    def _policy(self, entry: Layer, slots: int) -> LayerPolicy:
        settings, top_k = self._settings, self._header.top_k
        if settings.policy == "lfu-decay":
            return DecayedCounts(slots, top_k, settings.half_life)
        if settings.policy == "lru+hold":
            return HeldPrompt(slots, top_k, settings.hold)
        if settings.policy in EVICTIONS:
            return LayerPolicy(slots, rank=None if entry.usage is None else entry.usage.leaving)
        pooled = self._pool.join(slots, entry.row.size)
        pooled.on_leave = entry.hide
        return pooled

    def complete(self, layer: int) -> bool:
        """See Flow; where layers share their places, one that has all of its experts may lose them."""
        if self._pool is None:
            return super().complete(layer)
        return self._pool.slots >= sum(self._header.experts)

    def resident(self, layer: int) -> np.ndarray:
        """[E] bool, which experts the router may take for being in memory."""
        self.settle(layer)
        return self._layers[layer].row != NO_SLOT

    def _start(self, layer: int, admitted: Sequence[Admission], ahead: bool) -> None:
        entry = self._layers[layer]
        for admission in admitted:
            if admission.evicted is not None:
                entry.hide(admission.evicted)
            entry.loads[admission.expert] = Load(None, self._number, ahead)
        if self.tally is not None and admitted:
            if ahead:
                self.tally.ahead_bytes += len(admitted) * entry.record_bytes
            else:
                self.tally.demanded[len(admitted), entry.record_bytes] += 1

    def _end(self, layer: int, expert: int, keep: bool = True) -> None:
        entry = self._layers[layer]
        del entry.loads[expert]
        if keep:
            entry.show(expert)
            self.bytes_read += entry.record_bytes
        else:
            entry.policy.forget(expert)


class Replay:
    """One replay of one recording."""

    def __init__(self, trace: Trace, settings: ReplaySettings) -> None:
        """Raises ValueError, naming the setting, where it does not suit the recording."""
        header = trace.header
        if settings.slots < header.top_k:
            raise ValueError(f"slots are {settings.slots}; allowed: at least {header.top_k}, as a token uses")
        if settings.moce is not None:
            settings.moce.check(header.top_k)
        self._trace, self._header, self._settings = trace, header, settings
        self._moce = settings.moce if settings.moce is not None and settings.moce.bonus else None
        self._flow = _Simulated(header, settings)
        layers = len(header.experts)
        self._found = ReplayResult(self._flow.counters, [0] * layers, [0] * layers)
        deepest = None if self._moce is None else self._moce.max_rank or max(header.experts)
        self._found.limited = deepest is not None and deepest > header.kept and not header.whole

    def run(self, start: Sequence[Sequence[int]] | None = None) -> ReplayResult:
        """All passes.

        Args:
            start: experts in memory before the first pass, by layer, the oldest first; by default the recorded ones, of
                which the newest are kept where there are fewer slots. Later changes of residency in the recording are
                followed where the settings are those of the recorded run.
        """
        recorded = self._trace.start
        if start is None and recorded is not None:
            start = [present for _, present in recorded.layers]
        self._flow.restart(self._found.counters, start)
        for event in self._trace.events:
            if isinstance(event, Pass):
                self._pass(event)
            elif event is not recorded and self._as_recorded(event):
                self._flow.restart(self._found.counters, [present for _, present in event.layers])
        self._flow.commit(self._flow._window[1])
        self._found.bytes_read = self._flow.bytes_read
        self._found.present = [self._flow.present(i) for i in range(len(self._header.experts))]
        return self._found

    def _as_recorded(self, event: Residency) -> bool:
        header, settings = self._header, self._settings
        slots = [min(settings.slots, experts) for experts in header.experts]
        moce = [None if found is None else replace(found, measure=False) for found in (self._moce, header.moce)]
        same = settings.policy == header.eviction and settings.read_ahead == header.read_ahead and moce[0] == moce[1]
        return same and slots == [count for count, _ in event.layers]

    def _pass(self, event: Pass) -> None:
        flow, windows = self._flow, self._found.windows
        flow.begin(event.batch, event.tokens)
        guesses = {entry.layer: entry.guess for entry in event.layers}
        flow.tally = None if event.prompt else windows
        if not event.prompt and any(entry.layer < self._header.trunk for entry in event.layers):
            windows.passes += 1
            windows.tokens += event.batch * event.accepted
        for entry in event.layers:
            if event.prompt:
                self._prompt(entry, guesses.get(entry.layer + 1))
                continue
            for i in range(0, len(entry.routed.total), self._header.window):
                self._window(entry, guesses.get(entry.layer + 1), slice(i, i + self._header.window))
        flow.commit(event.accepted)

    def _window(self, entry: LayerRouting, ahead: Ranked | None, rows: slice) -> None:
        """Up to 8 tokens, as ArenaExperts runs them."""
        flow, layer, routed = self._flow, entry.layer, _rows(entry.routed, rows)
        resident = flow.resident(layer)
        ranks = self._ranks(routed, resident)
        if flow.complete(layer):
            return
        soon = self._guess(layer + 1, None if ahead is None else _rows(ahead, rows), self._moce is not None)
        ids = np.take_along_axis(routed.ids, ranks, 1).astype(np.int64)
        self._count(layer, routed, ranks)
        here, missing = flow.use(layer, ids)
        self._found.windows.hits += len(here)
        self._found.windows.misses += len(missing)
        self._found.windows.used_bytes += (len(here) + len(missing)) * self._header.record_bytes[layer]
        if not missing:
            self._ahead(layer + 1, soon)
        for i, wave in enumerate(flow.waves(layer, missing)):
            if i == 0:
                self._ahead(layer + 1, soon)
            flow.arrive(layer, wave)

    def _prompt(self, entry: LayerRouting, ahead: Ranked | None) -> None:
        """Many tokens, as ArenaExperts runs them."""
        flow, layer = self._flow, entry.layer
        soon = self._guess(layer + 1, ahead, False)
        chosen = entry.routed.ids[:, : self._header.top_k].reshape(-1)
        flow.prompted(layer, chosen.reshape(-1, self._header.top_k).astype(np.int64))
        experts, size = np.unique(chosen).astype(np.int64), self._header.group_sizes[layer] or chosen.size
        groups = [experts[i : i + size] for i in range(0, experts.size, size)]
        for _ in PromptReads(flow, layer, groups, Counter(chosen.tolist())).parts():
            pass
        if soon is not None:
            flow.ahead(layer + 1, np.unique(soon).tolist(), flow.slots(layer + 1) // AHEAD_SHARE)

    def _ranks(self, routed: Ranked, resident: np.ndarray) -> np.ndarray:
        top_k = self._header.top_k
        if self._moce is None:
            return np.broadcast_to(np.arange(top_k), (len(routed.total), top_k))
        return choose(routed.ids, routed.logits, resident, top_k, self._moce)

    def _guess(self, layer: int, found: Ranked | None, biased: bool) -> np.ndarray | None:
        """Ids [T, k] that a layer will probably need."""
        if not self._settings.read_ahead or layer >= self._header.trunk or self._flow.complete(layer) or found is None:
            return None
        if not biased:
            return found.ids[:, : self._header.top_k]
        return np.take_along_axis(found.ids, self._ranks(found, self._flow.resident(layer)), 1)

    def _ahead(self, layer: int, soon: np.ndarray | None) -> None:
        if soon is not None:
            self._flow.ahead(layer, soon.reshape(-1).tolist(), self._flow.slots(layer) // WINDOW_AHEAD_SHARE)

    def _count(self, layer: int, routed: Ranked, ranks: np.ndarray) -> None:
        found = self._found
        found.windows.waits += 1
        found.picks[layer] += ranks.size
        if self._moce is not None:
            found.substituted[layer] += int((ranks >= ranks.shape[1]).sum())
            error, norm = mixture_error(routed.logits, ranks, routed.total, self._header.normalize)
            found.error, found.norm = found.error + float(error.sum()), found.norm + float(norm.sum())


def replay(trace: Trace, settings: ReplaySettings, start: Sequence[Sequence[int]] | None = None) -> ReplayResult:
    """See Replay."""
    return Replay(trace, settings).run(start)


def recorded_settings(trace: Trace) -> ReplaySettings:
    """Those of the recorded run. Raises ValueError where all experts were in memory."""
    if trace.start is None or all(s >= e for (s, _), e in zip(trace.start.layers, trace.header.experts, strict=True)):
        raise ValueError("the recorded run had all experts in memory; name a number of slots")
    slots = max(slots for slots, _ in trace.start.layers)
    header = trace.header
    return ReplaySettings(slots, header.eviction, header.moce, header.read_ahead)


def learned_start(trace: Trace, slots: int) -> list[list[int]]:
    """What another run used most, by layer, the most used last: a first fill. Rejected tokens do not count."""
    header = trace.header
    counts = [np.zeros(experts, dtype=np.int64) for experts in header.experts]
    for event in trace.passes:
        kept = np.tile(np.arange(event.tokens) < event.accepted, event.batch)
        for entry in event.layers:
            np.add.at(counts[entry.layer], entry.routed.ids[kept, : header.top_k], 1)
    return [
        sorted(np.flatnonzero(found).tolist(), key=lambda e, found=found: (found[e], -e))[-slots:] for found in counts
    ]


def _rows(found: Ranked, rows: slice) -> Ranked:
    return Ranked(*(part[rows] for part in found))
