"""The composition root of packs: dense weights in memory, experts in the arena, the n-gram table in its file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_moe.config import ConfigError, ModelConfig
from mlx_moe.formats.pack import Pack, open_pack
from mlx_moe.models.qwen4_exp import Model
from mlx_moe.models.qwen4_exp import sanitize as names
from mlx_moe.models.qwen4_exp.gguf_names import Packed
from mlx_moe.paging.budget import Paging
from mlx_moe.paging.index import ExpertIndex
from mlx_moe.streaming import expert_source, plan_model, row_source
from mlx_moe.weights import Origin, cast, check_hashes, expect_blocks, expect_packing, packed_modules, put


def load_pack(
    folder: Path,
    dtype: mx.Dtype,
    overrides: Mapping[str, Any] | None = None,
    mtp: bool = True,
    mtp_norm_per_stream: bool = False,
    paging: Paging | None = None,
) -> tuple[Model, dict[str, Any]]:
    """Load a pack (formats/pack).

    Args:
        dtype: what to compute in; packed weights stay as they are.
        overrides: entries of the configuration that replace the pack's.
        mtp: whether to take the draft layer along, if there is one.
        mtp_norm_per_stream: as for ``load_model``.
        paging: how many experts stand in memory, and how the others are read.

    Returns:
        The model and the contents of config.json.

    Raises FileFormatError or ConfigError, or ValueError when it does not fit into memory; each in one line.
    """
    pack = open_pack(folder)
    raw = {**pack.raw, **(overrides or {})}
    config = ModelConfig.from_dict(raw)
    draft = mtp and pack.has_mtp
    index = ExpertIndex(pack.experts.files, pack.experts.layers[: config.num_hidden_layers + draft])
    paging = paging or Paging()
    plan = plan_model(folder, config, dtype, "auto" if mtp else None, paging)
    experts = expert_source(index, plan, paging)
    rows = row_source(config, pack.rows, dtype, experts, plan)
    model = Model(config, experts, rows, mtp=draft, mtp_norm_per_stream=mtp_norm_per_stream)
    model.eval()
    _put_dense(model, pack, dtype, draft)
    experts.fill()
    return model, raw


def _put_dense(model: Model, pack: Pack, dtype: mx.Dtype, draft: bool) -> None:
    """Read the dense weights and put them in their places."""
    modules, weights = dict(packed_modules(model)), {}
    files = {name: file.path.name for file in pack.files for name in file.tensors}
    origin = Origin(str(pack.folder), "config.json", lambda name: files.get(name, "file unknown"))
    for name, part in pack.dense():
        if name.startswith("mtp.") and not draft:
            continue
        module = modules.get(name.removesuffix(".weight"))
        if not isinstance(part, Packed):
            weights[name] = part
        elif part.data.dtype == mx.uint8 and module is not None:
            try:
                expect_blocks(module, name, part.format, dtype)
            except ConfigError as error:
                raise ConfigError(f"{pack.folder}: {error}") from None
            weights[name] = part.data
        else:
            weights[name] = cast(name, part.numbers(), dtype)
            mx.eval(weights[name])  # what it was made of goes at once
    hashes = names.hash_buffers(weights)
    check_hashes(hashes, model.config)
    weights = {name: tensor for name, tensor in weights.items() if name not in hashes}
    expect_packing(model, weights, origin, dtype)
    put(model, weights, origin, dtype)
