"""Experts and n-gram rows of a Hugging Face folder that stay in its files (dense weights: runtime.py)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from mlx_moe.config import ConfigError, ModelConfig
from mlx_moe.formats.hub import Request
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.hf_index import folder_index
from mlx_moe.model_sizes import model_sizes
from mlx_moe.models.qwen4_exp.sources import ExpertSource, RowSource
from mlx_moe.paging.budget import Paging
from mlx_moe.paging.index import ExpertIndex
from mlx_moe.paging.plan import MemoryPlan
from mlx_moe.paging.resident import ResidentExperts, ResidentRows
from mlx_moe.streaming import expert_source, plan_model, row_source


class Sources(NamedTuple):
    """Of experts and of n-gram rows; ``in_place``: they read files, so their weights are not to be loaded."""

    experts: ExpertSource
    rows: RowSource
    in_place: bool


def folder_sources(
    folder: Path, config: ModelConfig, dtype: mx.Dtype, mtp: bool, paging: Paging, lazy: bool = False
) -> Sources:
    """The sources of a folder of safetensors, not yet filled.

    Experts are arrays in memory where the files have no other way or all fit so, unless ``paging`` asks for more. Else
    they stand in the arena as the files have them, all or as many as fit, and n-gram rows are read from the files.

    Args:
        dtype: that the model computes in.
        mtp: whether there is a draft layer, and it is wanted.
        lazy: weights are to be read when they are first used, so nothing streams.

    Raises ValueError, in one line, for settings of paging that these files cannot obey, and where nothing fits.
    """
    asked = paging.asks or ("resident" if paging.resident else None)
    if lazy and asked:
        raise ValueError(f"{folder}: lazy and {asked} were both given; leave one out")
    plan = None if lazy else _plan(folder, config, dtype, mtp, paging)
    if plan is None or not plan.sizes.streamed:
        return Sources(ResidentExperts(config, config.num_hidden_layers + mtp), ResidentRows(config), in_place=False)
    index = folder_index(folder, config)
    experts = ExpertIndex(index.experts.files, index.experts.layers[: config.num_hidden_layers + mtp])
    source = expert_source(experts, plan, paging)
    return Sources(source, row_source(config, index.rows(), dtype, source, plan), in_place=True)


def _plan(folder: Path, config: ModelConfig, dtype: mx.Dtype, mtp: bool, paging: Paging) -> MemoryPlan | None:
    """What will be in memory; None where experts can only be arrays there, as far as memory reaches."""
    draft = "auto" if mtp else None
    try:
        found, sizes = model_sizes(Request(str(folder)), dtype.size, draft)
    except (ConfigError, FileFormatError):
        if paging.asks or paging.resident:
            raise
        return None  # who reads the weights says so too, or has a use for them
    if found.in_memory is None:
        return plan_model(folder, config, dtype, draft, paging, sizes)
    if paging.asks:
        raise ValueError(f"{folder}: {paging.asks} cannot be used: {found.in_memory}")
    return None
