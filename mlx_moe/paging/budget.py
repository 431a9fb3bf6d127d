"""What the user asks for: memory, experts in it, and how the others are read. Knows no MLX."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_moe.paging.moce import MoceConfig
from mlx_moe.paging.plan import Wanted, default_context, parse_bytes
from mlx_moe.paging.reader import THREADS
from mlx_moe.paging.sizes import ModelSizes

MIN_SLOTS = 1
IO = ("direct", "buffered")
SEEDS = ("usage", "profile", "empty")
EVICTIONS = ("lru", "frequency")


@dataclass(frozen=True)
class Paging:
    """How experts are kept and read.

    Attributes:
        memory: ceiling of the process, as 10GB or in bytes; None is the machine's.
        expert_slots: experts of every layer that stand in memory; None follows from the ceiling.
        resident: all experts stand in memory, or loading fails.
        io_threads: that read.
        read_ahead: read what the next layer will probably need.
        read_by_token: read also, for all layers as soon as a token is known, what it used before, as was learned.
        io: "direct" goes past the page cache and says where it cannot, "buffered" never does; None is direct, quietly.
        moce: prefer experts in memory in windows, which changes output; None is the plain router.
        prefill_step_size: prompt tokens per pass that are planned for.
        usage: learn from this run which experts are used, and remember it; otherwise it is neither read nor written.
        seed_residency: which experts are in memory first: "usage" by what was learned and the static profile, "profile"
            by that alone, "empty" none. None is "usage", or "profile" with moce, whose output depends on it, and
            without usage.
        eviction: "frequency": who is used least leaves memory first, by what was learned and by the text at hand;
            "lru": who was used longest ago. None is "frequency" with usage and "lru" without.
    """

    memory: str | int | None = None
    expert_slots: int | None = None
    resident: bool = False
    io_threads: int = THREADS
    read_ahead: bool = True
    read_by_token: bool = False
    io: str | None = None
    moce: MoceConfig | None = None
    prefill_step_size: int = Wanted.prefill_step_size
    usage: bool = True
    seed_residency: str | None = None
    eviction: str | None = None

    def __post_init__(self) -> None:
        if self.prefill_step_size < 1:
            raise ValueError(f"prefill_step_size is {self.prefill_step_size}; allowed: 1 or more")
        if self.resident and self.expert_slots is not None:
            raise ValueError("resident and expert_slots were both given; leave one out")
        if self.expert_slots is not None and self.expert_slots < MIN_SLOTS:
            raise ValueError(f"expert_slots is {self.expert_slots}; allowed: {MIN_SLOTS} or more")
        if not 1 <= self.io_threads <= 256:
            raise ValueError(f"io_threads is {self.io_threads}; allowed: 1 to 256")
        if not isinstance(self.moce, MoceConfig | None):
            raise ValueError(f"moce is {self.moce!r}; needed: a MoceConfig, or None")
        if self.io not in (None, *IO):
            raise ValueError(f"io is {self.io!r}; allowed: {', '.join(IO)}")
        for name, allowed in (("seed_residency", SEEDS), ("eviction", EVICTIONS)):
            if getattr(self, name) not in (None, *allowed):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        if self.read_by_token and not self.read_ahead:
            raise ValueError("read_by_token reads ahead, which is off; leave out one of them")
        if self.seed_residency == "usage" and not self.usage:
            raise ValueError("seed_residency is usage, which is off; choose profile or empty")
        if self.memory is not None:
            self._ceiling_bytes()

    @property
    def asks(self) -> str | None:
        """The setting, if any, that only experts which can stream obey."""
        names = ("memory", "expert_slots", "moce", "seed_residency", "eviction")
        return next((name for name in names if getattr(self, name) is not None), None)

    @property
    def seed(self) -> str:
        """What the first experts in memory follow from."""
        return self.seed_residency or ("usage" if self.usage and self.moce is None else "profile")

    @property
    def by_frequency(self) -> bool:
        """Whether experts that are used least leave memory first."""
        return self.eviction == "frequency" or (self.eviction is None and self.usage)

    def wanted(self, sizes: ModelSizes, item_bytes: int) -> Wanted:
        """What a plan is asked for; more slots than experts are as many as experts."""
        slots = None if self.expert_slots is None else min(self.expert_slots, sizes.config.num_experts)
        return Wanted(
            memory_bytes=None if self.memory is None else self._ceiling_bytes(),
            expert_slots=sizes.config.num_experts if self.resident else slots,
            context=default_context(sizes.config),
            prefill_step_size=self.prefill_step_size,
            item_bytes=item_bytes,
        )

    def _ceiling_bytes(self) -> int:
        if isinstance(self.memory, str):
            return parse_bytes(self.memory)
        if self.memory < 1:
            raise ValueError(f"memory is {self.memory}; needed: a size, as '10GB' or a number of bytes")
        return self.memory
