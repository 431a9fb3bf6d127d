"""What paging did: counters of hits, misses and reads. Knows no MLX."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class ExpertStats:
    """Counters since the model was loaded, or of one stretch of it.

    Attributes:
        slots: experts per layer that can stand in memory.
        layer_hits, layer_misses: experts that a layer found in memory, and that it did not; each once per window of up
            to 8 tokens or piece of a prompt. Layers whose experts are all in memory count nothing.
        evictions: experts that had to leave memory.
        ahead_useful, ahead_wasted, ahead_failed: experts read ahead and used, evicted unused, not readable.
        bytes_read: of experts, from files, also those of the first fill.
        demanded_wait_ms: time for which computing waited for reads, of rows of the n-gram table too.
        device_wait_ms: time for which it waited for the device.
        layer_picks, layer_substituted: experts that tokens of windows chose in layers that stream, and those of them
            that are not among the token's true best, since cache-aware routing preferred them. Each of these is in
            memory in place of one that is not: at the residency of its moment, a hit gained.
        layer_kl: nats by which the used mixtures are further from the router's distribution than the true ones, summed
            over tokens (paging.routing.divergence); zeros unless measured.
        seed: what the first experts in memory followed from: "usage", "profile", "blend" of both, or "empty".
        seed_hash: of that, 16 hexadecimal digits; None for "empty".
    """

    slots: int
    layer_hits: tuple[int, ...]
    layer_misses: tuple[int, ...]
    evictions: int
    ahead_useful: int
    ahead_wasted: int
    ahead_failed: int
    bytes_read: int
    demanded_wait_ms: float
    device_wait_ms: float
    layer_picks: tuple[int, ...] = ()
    layer_substituted: tuple[int, ...] = ()
    layer_kl: tuple[float, ...] = ()
    seed: str = "empty"
    seed_hash: str | None = None

    @property
    def hits(self) -> int:
        """Of all layers."""
        return sum(self.layer_hits)

    @property
    def misses(self) -> int:
        """Of all layers."""
        return sum(self.layer_misses)

    @property
    def hit_rates(self) -> tuple[float | None, ...]:
        """Per layer, hits / (hits + misses); None where neither was counted."""
        pairs = zip(self.layer_hits, self.layer_misses, strict=True)
        return tuple(hits / (hits + misses) if hits + misses else None for hits, misses in pairs)

    @property
    def substituted(self) -> int:
        """Of all layers."""
        return sum(self.layer_substituted)

    @property
    def agreements(self) -> tuple[float | None, ...]:
        """Per layer, the share of picks that are among the true best; None where none was counted."""
        pairs = zip(self.layer_picks, self.layer_substituted, strict=True)
        return tuple(1 - substituted / picks if picks else None for picks, substituted in pairs)

    @property
    def agreement(self) -> float | None:
        """Of all layers."""
        picks = sum(self.layer_picks)
        return 1 - self.substituted / picks if picks else None

    def since(self, earlier: ExpertStats) -> ExpertStats:
        """What was added after ``earlier``."""
        changed = {}
        for name in (field.name for field in fields(self) if field.name not in ("slots", "seed", "seed_hash")):
            now, then = getattr(self, name), getattr(earlier, name)
            pairs = isinstance(now, tuple)
            changed[name] = tuple(a - b for a, b in zip(now, then, strict=True)) if pairs else now - then
        return replace(self, **changed)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON: the counters, their sums and hit rates."""
        plain = asdict(self) | {"hits": self.hits, "misses": self.misses, "layer_hit_rates": self.hit_rates}
        plain |= {"picks": sum(self.layer_picks), "substituted": self.substituted, "kl": sum(self.layer_kl)}
        plain |= {"agreement": self.agreement, "layer_agreements": self.agreements}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
