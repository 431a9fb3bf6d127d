"""The composition root of streaming: machine, reader, arena and sources meet, for GGUF files and packs alike."""

from __future__ import annotations

import logging
from pathlib import Path

import mlx.core as mx

from mlx_moe.config import ModelConfig
from mlx_moe.paging.arena import arena_pages
from mlx_moe.paging.budget import Paging
from mlx_moe.paging.experts import ArenaExperts
from mlx_moe.paging.files import Direct
from mlx_moe.paging.index import ExpertIndex, RowIndex
from mlx_moe.paging.reader import ExpertReader
from mlx_moe.paging.residency import Room
from mlx_moe.paging.resident import ResidentRows
from mlx_moe.paging.rows import FileRows
from mlx_moe.platform import DIRECT_ALIGNMENT, device, max_buffer_bytes, open_direct

logger = logging.getLogger(__name__)


def expert_source(
    source: Path, config: ModelConfig, index: ExpertIndex, dense_bytes: int, paging: Paging
) -> ArenaExperts:
    """Experts of a model in files, all or some of them in memory; not yet filled.

    Args:
        source: what messages call the model.
        index: of every MoE layer, the draft layer's last.
        dense_bytes: that the other weights take.

    Raises ValueError, in one line, when the slots asked for do not fit into memory beside them.
    """
    machine = device()
    memory = machine.working_set_bytes or machine.memory_bytes
    room = Room(paging.budget_bytes(memory, dense_bytes), max_buffer_bytes())
    top_k, most = config.num_experts_per_tok, max(layer.experts for layer in index.layers)

    def fits(slots: int) -> bool:
        try:
            arena_pages([(layer.record_bytes, min(slots, layer.experts)) for layer in index.layers], *room)
        except ValueError:
            return False
        return True

    try:
        slots = paging.slots(most, top_k, fits)
        experts = ArenaExperts(config, index, slots, room, _reader(index, paging), paging.read_ahead)
    except ValueError as error:
        raise ValueError(f"{source}: {error}; this machine has {machine.memory_bytes / 1e9:.1f} GB") from None
    if slots < most:
        logger.info("%s: %d of %d experts per layer in memory, the others stream", source, slots, most)
    return experts


def row_source(
    config: ModelConfig, table: RowIndex | None, dtype: mx.Dtype, experts: ArenaExperts
) -> FileRows | ResidentRows:
    """Rows of the n-gram table, read by the threads that read experts; in memory where the model has no table file."""
    if table is None:
        return ResidentRows(config)
    return FileRows(config, table, dtype, experts.reader, early=experts.streams)


def _reader(index: ExpertIndex, paging: Paging) -> ExpertReader:
    if paging.io == "buffered":
        return ExpertReader(index, paging.io_threads)
    level = logging.INFO if paging.io is None else logging.WARNING
    return ExpertReader(index, paging.io_threads, Direct(open_direct, DIRECT_ALIGNMENT, level))
