"""A GGUF model as the source of a conversion: everything stays in its blocks and in the file's head order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import mlx.core as mx

from mlx_moe.config import ModelConfig
from mlx_moe.conversion.source import Dense, LayerSource, Source, check_complete, check_hashes, check_table
from mlx_moe.conversion.stored import Stored
from mlx_moe.conversion.tokenizer_files import copy_tokenizer
from mlx_moe.formats.checkpoint import write_json
from mlx_moe.formats.gguf import GgufFile, TensorPlace, open_gguf
from mlx_moe.formats.gguf_model import expert_index, model_config, row_index
from mlx_moe.models.qwen4_exp.gguf_config import hash_constants
from mlx_moe.models.qwen4_exp.gguf_names import Packed, Recipe, build, is_streamed, recipes
from mlx_moe.paging.index import ExpertIndex, LayerIndex, PartIndex

logger = logging.getLogger(__name__)


def open_gguf_source(path: Path) -> Source:
    """See ``source.open_source``."""
    file = open_gguf(path)
    raw = model_config(file)
    config = ModelConfig.from_dict(raw)
    index, place = expert_index(file, config), row_index(file, config)
    dense = tuple(_dense(file, name, recipe) for name, recipe in _dense_recipes(file, config).items())
    mtp = len(index.layers) > config.num_hidden_layers
    check_complete(path, config, dense, mtp)
    check_hashes(path, config, hash_constants(file.metadata, config))
    table = (Stored(place.file, place.offset, (place.rows, place.width), place.format),) if place else None
    if table:
        check_table(path, config, table)
    names = [f"model.layers.{i}" for i in range(config.num_hidden_layers)] + ["mtp.layers.0"] * mtp
    return Source(
        kind="GGUF",
        path=path,
        files=file.paths,
        raw=raw,
        config=config,
        norm_convention="folded",
        layers=tuple(_layer(name, index, layer) for name, layer in zip(names, index.layers, strict=True)),
        dense=dense,
        table=table,
        place=place,
        save_tokenizer=partial(_save_tokenizer, file),
    )


def _dense_recipes(file: GgufFile, config: ModelConfig) -> Mapping[str, Recipe]:
    return {name: recipe for name, recipe in recipes(file.tensors, config).items() if not is_streamed(name)}


def _layer(name: str, index: ExpertIndex, layer: LayerIndex) -> LayerSource:
    def matrices(part: PartIndex) -> list[Stored]:
        places = zip(part.files.tolist(), part.offsets.tolist(), strict=True)
        return [Stored(index.files[file], offset, part.shape, part.format) for file, offset in places]

    return LayerSource(name, *(matrices(part) for part in layer.parts))


def _dense(file: GgufFile, name: str, recipe: Recipe) -> Dense:
    """A weight that is a run of rows is read by rows; the small ones that must be made are made whole."""
    place = file.place(recipe.sources[0])
    matrix = recipe.step == "join" and len(recipe.sources) == 1 and len(place.shape) == 2
    if matrix:
        return Dense.of(name, _stored(place))
    whole = _made(file, name, recipe)
    shape = whole.data.shape
    if whole.data.dtype == mx.uint8:
        shape = (*shape[:-1], whole.format.row_weights(shape[-1]))
    return Dense(name, tuple(shape), whole.format.name, whole.data.nbytes, partial(_made_rows, file, name, recipe))


def _stored(place: TensorPlace) -> Stored:
    return Stored(place.file, place.offset, place.shape, place.format.name)


def _made(file: GgufFile, name: str, recipe: Recipe) -> Packed:
    parts = [Packed(file.read(source), file.place(source).format) for source in recipe.sources]
    return build(name, recipe, parts)


def _made_rows(file: GgufFile, name: str, recipe: Recipe, start: int, stop: int) -> Packed:
    whole = _made(file, name, recipe)
    return Packed(whole.data[start:stop], whole.format)


def _save_tokenizer(file: GgufFile, folder: Path) -> None:
    """Files beside the model come first, as when it is loaded; else those that its metadata give."""
    if copy_tokenizer(file.paths[0].parent, folder):
        return
    if file.metadata.get("tokenizer.ggml.tokens") is None:
        logger.warning("%s: has no tokenizer; put tokenizer.json beside it or into the pack", file.paths[0])
        return
    from mlx_moe.formats.gguf_tokenizer import save_tokenizer, stop_ids

    save_tokenizer(file, folder)
    write_json(folder / "generation_config.json", {"eos_token_id": stop_ids(file)})
