"""The composition root of streaming: plan, reader, arena and sources meet, for GGUF files, packs and folders."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlx_moe.config import ModelConfig
from mlx_moe.model_sizes import local_sizes
from mlx_moe.paging.budget import Paging
from mlx_moe.paging.experts import ArenaExperts
from mlx_moe.paging.files import Direct
from mlx_moe.paging.index import ExpertIndex, JoinedRows, RowIndex
from mlx_moe.paging.learning import Learning
from mlx_moe.paging.plan import Machine, MemoryPlan, plan_memory
from mlx_moe.paging.reader import ExpertReader, can_be_direct
from mlx_moe.paging.residency import Room
from mlx_moe.paging.resident import ResidentRows
from mlx_moe.paging.rows import FileRows
from mlx_moe.paging.sizes import ModelSizes
from mlx_moe.paging.token_memory import TokenMemory
from mlx_moe.paging.usage import Usage, blend
from mlx_moe.platform import DIRECT_ALIGNMENT, MemoryLimits, device, max_buffer_bytes, open_direct, taken_bytes
from mlx_moe.usage_store import UsageStore

logger = logging.getLogger(__name__)


def plan_model(
    source: Path,
    config: ModelConfig,
    dtype: mx.Dtype,
    mtp: str | Path | None,
    paging: Paging,
    sizes: ModelSizes | None = None,
) -> MemoryPlan:
    """How much of a model in files will be in memory on this machine, as ``mlx-moe plan`` says.

    What other models of this process hold is not available any more.

    Args:
        source: a GGUF file, a folder of its shards, a pack, or a folder whose experts can be read in place.
        config: what the model is built from.
        dtype: that it computes in.
        mtp: as for ``load_model``.
        sizes: of the source, where they are known already.

    Raises ValueError, in one line, when it does not fit.
    """
    sizes = (sizes or local_sizes(source, dtype.size, mtp)).of(config)
    if paging.moce is not None:
        sizes = replace(sizes, whole=None)  # which prefers nobody
    here, taken = device(), taken_bytes()
    try:
        wanted = paging.wanted(sizes, dtype.size)
        plan = plan_memory(sizes, Machine(here.memory_bytes, here.working_set_bytes, taken), wanted).require()
    except ValueError as error:
        others = f", of which other models of this process hold {taken / 1e9:.2f} GB" if taken else ""
        raise ValueError(f"{source}: {error}; this machine has {here.memory_bytes / 1e9:.1f} GB{others}") from None
    if plan.slots < config.num_experts:
        logger.info(
            "%s: %d of %d experts per layer in memory, the others stream", source, plan.slots, config.num_experts
        )
    return plan


def expert_source(index: ExpertIndex, plan: MemoryPlan, paging: Paging) -> ArenaExperts:
    """Experts of a model in files, as many in memory as the plan says; not yet filled.

    MLX's limits follow the plan until the source is closed or forgotten.

    Args:
        index: of every MoE layer, the draft layer's last.
    """
    left = plan.ceiling_bytes - (plan.total_bytes - plan.arena_bytes)
    weights = plan.dense_bytes + plan.mtp_bytes
    beside = plan.gpu_bytes - plan.arena_bytes
    # With cache-aware routing the number of slots decides what is said.
    elastic = paging.expert_slots is None and not paging.resident and paging.moce is None
    limits = MemoryLimits(beside, plan.workspace_bytes, spare_bytes=beside - weights, elastic=elastic)
    room = Room(left, max_buffer_bytes())
    reader = _reader(index, paging)
    learning = _learning(index, plan, paging)
    return ArenaExperts(
        plan.sizes.config, index, plan.slots, room, reader, paging.read_ahead, limits, paging.moce, learning
    )


def row_source(
    config: ModelConfig, table: RowIndex | JoinedRows | None, dtype: mx.Dtype, experts: ArenaExperts, plan: MemoryPlan
) -> FileRows | ResidentRows:
    """Rows of the n-gram table, read by the threads that read experts; in memory where the model has no table file."""
    if table is None:
        return ResidentRows(config)
    cache_bytes = plan.row_cache_bytes // 2  # their index takes as much
    return FileRows(config, table, dtype, experts.reader, early=experts.streams, cache_bytes=cache_bytes)


def _learning(index: ExpertIndex, plan: MemoryPlan, paging: Paging) -> Learning | None:
    """What a model that streams starts with and remembers; of one whose experts are all in memory nothing."""
    config, layers = plan.sizes.config, len(index.layers)
    if plan.slots >= config.num_experts:
        return None
    store = UsageStore.of(config, index)
    usage = store.read("usage") if paging.usage else None
    profile = store.read("profile") if paging.seed != "empty" else None
    seed = blend(
        usage if paging.seed == "usage" else None, profile, layers, config.num_experts, config.num_experts_per_tok
    )
    before = usage or Usage.none(layers, config.num_experts)
    save, save_tokens = store.savers() if paging.usage else (None, None)
    tokens = _tokens(store, paging) if paging.read_by_token else None
    if tokens is None or paging.seed != "usage":
        save_tokens = None  # which would replace what is remembered by what this run learned alone
    return Learning(seed, before, save, paging.by_frequency, tokens, save_tokens)


def _tokens(store: UsageStore, paging: Paging) -> TokenMemory:
    """What is remembered by token, empty where the start is not to follow from it."""
    found = store.read_tokens() if paging.seed == "usage" else None
    return found or TokenMemory(store.trunk, store.experts, store.top_k)


def _reader(index: ExpertIndex, paging: Paging) -> ExpertReader:
    if paging.io == "buffered":
        return ExpertReader(index, paging.io_threads)
    level = logging.INFO if paging.io is None else logging.WARNING
    if not can_be_direct(index, DIRECT_ALIGNMENT):
        why = f"since no read starts at a multiple of {DIRECT_ALIGNMENT} bytes and is one long"
        logger.log(level, "%s: experts are read through the page cache, %s", index.files[0].parent, why)
        return ExpertReader(index, paging.io_threads)
    return ExpertReader(index, paging.io_threads, Direct(open_direct, DIRECT_ALIGNMENT, level))
