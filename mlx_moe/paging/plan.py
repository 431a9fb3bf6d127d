"""The memory plan: what a model takes beside its experts, and how many experts' slots fit into the rest.

Numbers in, a frozen record out. Knows no MLX, no file and no machine; ``estimate.py`` says what a plan may give.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from mlx_moe.config import LINEAR, ModelConfig
from mlx_moe.paging.sizes import ModelSizes, sparse_cache_bytes, state_bytes, workspace_bytes

GPU_SHARE = 0.75
"""Of all memory: what macOS recommends as a GPU's working set. Machines with 64 GB report 75 %, those with 32 GB and
less have reported 67 % (llama.cpp's issues 1870 and 2011), so measure where it matters."""
SYSTEM_SHARE, SYSTEM_BYTES = 1 / 8, 3 * 10**9
"""What is left for the system at least: a share of all memory and not less than some. A plan never needs swap."""
PROCESS_BYTES = 300 << 20
"""Python with its libraries (87 MB seen on Linux) and a tokenizer of 250,000 entries (125 MB; 190 more while it is
built, which temporaries use afterwards); not the GPU's."""
ROW_CACHE_BYTES = 64 << 20
"""Rows of the n-gram table that are kept, and their index; not the GPU's."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True)
class Machine:
    """Its memory, and what Metal recommends as the most that the GPU should use; None where nothing does.

    ``taken_bytes`` of it are this process's already: other models'.
    """

    memory_bytes: int
    working_set_bytes: int | None = None
    taken_bytes: int = 0

    @classmethod
    def simulated(cls, memory_bytes: int) -> Machine:
        """A Mac with this much memory."""
        return cls(memory_bytes, int(GPU_SHARE * memory_bytes))

    @property
    def gpu_bytes(self) -> int:
        """The most for the GPU as the machine is set up, without what is taken."""
        return max(0, (self.working_set_bytes or int(GPU_SHARE * self.memory_bytes)) - self.taken_bytes)

    @property
    def usable_bytes(self) -> int:
        """The most for any process, so that the system never swaps, without what is taken."""
        system = max(SYSTEM_BYTES, int(SYSTEM_SHARE * self.memory_bytes))
        return max(0, self.memory_bytes - system - self.taken_bytes)


@dataclass(frozen=True)
class Wanted:
    """What the user asks for.

    Attributes:
        memory_bytes: the process's ceiling, for all its models; None is what the GPU may use as the machine is set up.
        expert_slots: per layer; None is as many as fit.
        context: tokens.
        snapshots: of recurrent states, for prompts that are continued.
        prefill_step_size: prompt tokens per pass.
        item_bytes: of a number that the model computes in.
    """

    memory_bytes: int | None = None
    expert_slots: int | None = None
    context: int = 32768
    snapshots: int = 1
    prefill_step_size: int = 2048
    item_bytes: int = 2
    row_cache_bytes: int = ROW_CACHE_BYTES

    def __post_init__(self) -> None:
        for name, low in (("context", 1), ("snapshots", 0), ("prefill_step_size", 1), ("row_cache_bytes", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {low} or more")


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. With a shortfall it shows the least that the model needs, and cannot be run."""

    sizes: ModelSizes
    machine: Machine
    wanted: Wanted
    ceiling_bytes: int
    slots: int
    dense_bytes: int
    mtp_bytes: int
    kv_bytes: int
    state_bytes: int
    snapshot_bytes: int
    workspace_bytes: int
    row_cache_bytes: int
    process_bytes: int
    arena_bytes: int

    @property
    def parts(self) -> dict[str, int]:
        """By name, in order."""
        names = ("dense", "mtp", "kv", "state", "snapshot", "workspace", "row_cache", "process", "arena")
        return {name: getattr(self, f"{name}_bytes") for name in names}

    @property
    def total_bytes(self) -> int:
        """Of the process."""
        return sum(self.parts.values())

    @property
    def gpu_bytes(self) -> int:
        """What of it is MLX's."""
        return self.total_bytes - self.process_bytes - self.row_cache_bytes

    @property
    def system_bytes(self) -> int:
        """What the machine has beside it; negative where it lacks that much."""
        return self.machine.memory_bytes - self.machine.taken_bytes - self.total_bytes

    @property
    def shortfall_bytes(self) -> int:
        """What is missing; 0 when the model can be run."""
        return max(0, self.total_bytes - self.ceiling_bytes)

    @property
    def wired_limit_mb(self) -> int | None:
        """For ``sysctl iogpu.wired_limit_mb``, where the plan needs more than Metal recommends; else None."""
        need = self.gpu_bytes + self.machine.taken_bytes
        over = self.machine.working_set_bytes is not None and need > self.machine.working_set_bytes
        return -(-need // (256 << 20)) * 256 if over and not self.shortfall_bytes else None

    @property
    def is_capped(self) -> bool:
        """Whether the machine cannot give what was asked for."""
        asked = self.wanted.memory_bytes
        return asked is not None and asked - self.machine.taken_bytes > self.ceiling_bytes

    def require(self) -> MemoryPlan:
        """Itself. Raises ValueError, in one line, when the model does not fit."""
        if self.shortfall_bytes:
            raise ValueError(
                f"{_gb(self.total_bytes)} are needed for {self.slots} experts per layer and a context of"
                f" {self.wanted.context}, {_gb(self.ceiling_bytes)} may be used; see mlx-moe plan for what would help"
            )
        return self


def default_context(config: ModelConfig) -> int:
    """Tokens to plan for when the user names no number."""
    return min(Wanted.context, config.max_position_embeddings)


def plan_memory(sizes: ModelSizes, machine: Machine, wanted: Wanted) -> MemoryPlan:
    """Fixed parts first; what is left of the ceiling becomes slots, the same number in every layer.

    Where a model has another way to be in memory as a whole (``sizes.whole``), fits so, and neither a ceiling nor a
    number of slots is asked for, the plan is that.

    Raises ValueError for a context or a number of slots that the model cannot have.
    """
    if sizes.whole is not None and wanted.memory_bytes is None and wanted.expert_slots is None:
        plan = plan_memory(sizes.whole, machine, wanted)
        if not plan.shortfall_bytes:
            return plan
    config, least, most = sizes.config, sizes.least_slots, sizes.most_slots
    if wanted.context > config.max_position_embeddings:
        raise ValueError(f"context is {wanted.context}; the model's is at most {config.max_position_embeddings}")
    if wanted.expert_slots is not None and not least <= wanted.expert_slots <= most:
        raise ValueError(f"expert_slots is {wanted.expert_slots}; allowed: {least} to {most}")
    attention = config.num_hidden_layers - config.layer_types.count(LINEAR)
    keys = sparse_cache_bytes(config, wanted.context, wanted.item_bytes)
    states = state_bytes(config, wanted.item_bytes)
    row_cache = min(wanted.row_cache_bytes, sizes.table_bytes)
    beside = PROCESS_BYTES + row_cache
    asked = machine.gpu_bytes + beside
    if wanted.memory_bytes is not None:
        asked = max(0, wanted.memory_bytes - machine.taken_bytes)
    plan = MemoryPlan(
        sizes=sizes,
        machine=machine,
        wanted=wanted,
        ceiling_bytes=min(asked, machine.usable_bytes),
        slots=0,
        dense_bytes=sizes.dense_bytes,
        mtp_bytes=sizes.mtp_bytes + sizes.drafts * keys,
        kv_bytes=attention * keys,
        state_bytes=states,
        snapshot_bytes=wanted.snapshots * states,
        workspace_bytes=workspace_bytes(config, wanted.prefill_step_size, wanted.item_bytes, wanted.context),
        row_cache_bytes=row_cache,
        process_bytes=PROCESS_BYTES,
        arena_bytes=sizes.arena_bytes(0),
    )
    room = plan.ceiling_bytes - plan.total_bytes
    slots = wanted.expert_slots or min(max(room // sizes.slot_bytes, least), most)
    return replace(plan, slots=slots, arena_bytes=sizes.arena_bytes(slots))


@dataclass(frozen=True)
class Remedies:
    """What would make a model fit that does not, each on its own; None where it would not.

    Attributes:
        slots: fewer than were asked for.
        context: a smaller one.
        step: smaller pieces of the prompt.
        memory_bytes: more of this machine's memory, perhaps beyond what Metal recommends.
        machine_bytes: memory of a machine that is enough as it is set up.
    """

    slots: int | None
    context: int | None
    step: int | None
    memory_bytes: int | None
    machine_bytes: int


def remedies(plan: MemoryPlan) -> Remedies:
    """What would make it fit."""
    wanted, taken = plan.wanted, plan.machine.taken_bytes
    total, gpu = plan.total_bytes + taken, plan.gpu_bytes + taken

    def fitting(**changes: int | None) -> MemoryPlan | None:
        other = plan_memory(plan.sizes, plan.machine, replace(wanted, **changes))
        return None if other.shortfall_bytes else other

    fewer = fitting(expert_slots=None) if wanted.expert_slots else None
    contexts, steps = _halves(wanted.context, 2048), _halves(wanted.prefill_step_size, 256)
    return Remedies(
        slots=fewer.slots if fewer else None,
        context=next((tokens for tokens in contexts if fitting(context=tokens)), None),
        step=next((step for step in steps if fitting(prefill_step_size=step)), None),
        memory_bytes=total if fitting(memory_bytes=total) else None,
        machine_bytes=max(int(gpu / GPU_SHARE), total + SYSTEM_BYTES, int(total / (1 - SYSTEM_SHARE))) + 1,
    )


def _halves(value: int, low: int) -> list[int]:
    """Powers of two below ``value``, descending to ``low``."""
    return [1 << bits for bits in range(value.bit_length(), -1, -1) if low <= 1 << bits < value]


def parse_bytes(text: str) -> int:
    """A size such as 12GB, 11.5GiB or 800MB. Raises ValueError, in one line, for anything else."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*([KMG]i?B)", text.strip(), re.IGNORECASE)
    if not match or not float(match[1]):
        raise ValueError(f"{text[:40]!r} is not a size such as 12GB, 11.5GiB or 800MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
