"""The composition root of GGUF files: dense weights in memory, experts in the arena, the n-gram table in the file.

All of them stay packed as the file has them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_moe.config import ConfigError, ModelConfig
from mlx_moe.formats.gguf import GgufFile, neighbours, open_gguf
from mlx_moe.formats.gguf_model import expert_index, has_draft, model_config, read_weights, row_index
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.models.qwen4_exp import Model
from mlx_moe.models.qwen4_exp.gguf_config import ARCHITECTURE, hash_constants
from mlx_moe.models.qwen4_exp.gguf_names import Recipe, is_streamed, recipes
from mlx_moe.paging.budget import Paging
from mlx_moe.paging.index import ExpertIndex
from mlx_moe.streaming import expert_source, plan_model, row_source
from mlx_moe.weights import Origin, cast, check_hashes, expect_blocks, packed_modules, put

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Share:
    """A file, and the dense weights that come from it."""

    file: GgufFile
    recipes: Mapping[str, Recipe]


def is_gguf(source: Path) -> bool:
    """Whether a path is a GGUF file, or a folder that holds such files and no safetensors."""
    if source.is_dir():
        return next(source.glob("*.gguf"), None) is not None and next(source.glob("*.safetensors"), None) is None
    return source.suffix == ".gguf" and source.exists()


def load_gguf(
    source: Path,
    dtype: mx.Dtype,
    overrides: Mapping[str, Any] | None = None,
    mtp: str | Path | None = "auto",
    mtp_norm_per_stream: bool = False,
    paging: Paging | None = None,
) -> tuple[Model, dict[str, Any]]:
    """Load a model whose file ``is_gguf``.

    Plain numbers of the file become arrays of ``dtype``; everything else stays in its blocks.

    Args:
        overrides: entries of the configuration that replace the file's.
        mtp, mtp_norm_per_stream: as for ``load_model``.
        paging: how many experts stand in memory, and how the others are read.

    Returns:
        The model and its configuration as a config.json would have it.

    Raises FileFormatError, ConfigError, or ValueError when it does not fit into memory; each in one line.
    """
    file = open_gguf(source)
    with _named(file):
        raw = {**_raw_config(file), **(overrides or {})}
        config = ModelConfig.from_dict(raw)
        check_hashes(hash_constants(file.metadata, config), config)
    draft = _draft_file(file, config, mtp)
    shares = _shares(file, draft, config)
    index, paging = _index(file, draft, config), paging or Paging()
    plan = plan_model(source, config, dtype, mtp, paging)
    experts = expert_source(index, plan, paging)
    rows = row_source(config, row_index(file, config), dtype, experts, plan)
    model = Model(config, experts, rows, mtp=draft is not None, mtp_norm_per_stream=mtp_norm_per_stream)
    model.eval()
    _put_dense(model, shares, dtype)
    experts.fill()
    return model, raw


@contextlib.contextmanager
def _named(file: GgufFile) -> Iterator[None]:
    """What is wrong with the contents of a file becomes one line that names it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file.paths[0]}: {error}") from None


def _raw_config(file: GgufFile) -> dict[str, Any]:
    """The contents of a config.json. Raises ConfigError for files that hold something else than the text model."""
    if file.metadata.get("general.type") == "mmproj" or file.metadata.get("general.architecture") == "clip":
        raise ConfigError("holds an image encoder alone; name the text model's file")
    if _is_draft_alone(file):
        raise ConfigError("holds a draft layer alone; name the model's file, and this one as its mtp")
    return model_config(file)


def _draft_file(file: GgufFile, config: ModelConfig, mtp: str | Path | None) -> GgufFile | None:
    """The file that the draft layer comes from, perhaps the model's own."""
    if mtp is None:
        return None
    if mtp == "auto":
        return file if has_draft(file, config) else _beside(file, config)
    draft = open_gguf(Path(mtp).expanduser())
    if not _fits(draft, config):
        wanted = f"blk.{config.num_hidden_layers}.nextn of {ARCHITECTURE}"
        raise FileFormatError(f"{draft.paths[0]}: holds no draft layer of this model ({wanted}); name another file")
    return draft


def _beside(file: GgufFile, config: ModelConfig) -> GgufFile | None:
    """The one file in the model's folder that holds its draft layer alone."""
    files = [GgufFile([header]) for header in neighbours(file.paths[0])]
    found = [other for other in files if _fits(other, config) and _is_draft_alone(other)]
    if len(found) > 1:
        names = ", ".join(other.paths[0].name for other in found[:4])
        logger.warning("%s: several draft layers lie beside it (%s); name one as mtp", file.paths[0], names)
        return None
    return found[0] if found else None


def _is_draft_alone(file: GgufFile) -> bool:
    drafts = any(".nextn." in name for name in file.tensors)
    return drafts and not any(name.startswith("blk.0.") for name in file.tensors)


def _fits(file: GgufFile, config: ModelConfig) -> bool:
    return file.metadata.get("general.architecture") == ARCHITECTURE and has_draft(file, config)


def _shares(file: GgufFile, draft: GgufFile | None, config: ModelConfig) -> list[_Share]:
    """The dense weights of the model, and of its draft layer."""
    return [
        _Share(source, _dense(source, config, draft=own))
        for source, own in ((file, False), (draft, True))
        if source is not None
    ]


def _dense(file: GgufFile, config: ModelConfig, draft: bool) -> dict[str, Recipe]:
    with _named(file):
        found = recipes(file.tensors, config)
    return {
        weight: recipe
        for weight, recipe in found.items()
        if weight.startswith("mtp.") == draft and not is_streamed(weight)
    }


def _index(file: GgufFile, draft: GgufFile | None, config: ModelConfig) -> ExpertIndex:
    """Experts of every layer, the draft layer's last."""
    layers = config.num_hidden_layers
    index = expert_index(file, config, range(layers))
    return index if draft is None else index.joined(expert_index(draft, config, [layers]))


def _put_dense(model: Model, shares: list[_Share], dtype: mx.Dtype) -> None:
    """Read the dense weights and put them in their places."""
    modules, weights, origins = dict(packed_modules(model)), {}, {}
    for share in shares:
        with _named(share.file):
            for weight, part in read_weights(share.file, share.recipes):
                module = modules.get(weight.removesuffix(".weight"))
                if part.data.dtype == mx.uint8 and module is not None:
                    expect_blocks(module, weight, part.format, dtype)
                    weights[weight] = part.data
                else:
                    weights[weight] = cast(weight, part.numbers(), dtype)
                    mx.eval(weights[weight])  # what it was made of goes at once
                origins[weight] = share.file.place(share.recipes[weight].sources[0]).file.name
    origin = Origin(str(shares[0].file.paths[0]), "its metadata", lambda name: origins.get(name, "file unknown"))
    put(model, weights, origin, dtype)
