"""A GGUF file as this package's model: configuration, dense weights, and where the streamed ones lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_moe.config import ModelConfig
from mlx_moe.formats.gguf import GgufFile, TensorPlace
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.models.qwen4_exp.gguf_config import config_from_gguf, has_mtp
from mlx_moe.models.qwen4_exp.gguf_names import Packed, Recipe, build
from mlx_moe.paging.index import ExpertIndex, LayerIndex, PartIndex, RowIndex


def model_config(file: GgufFile) -> dict[str, Any]:
    """The contents of a config.json for the model. Raises ConfigError when it cannot be run."""
    return config_from_gguf(file.metadata, {name: place.shape for name, place in file.tensors.items()})


def read_weights(file: GgufFile, recipes: Mapping[str, Recipe]) -> Iterator[tuple[str, Packed]]:
    """Canonical name and contents of every weight, each read when its turn comes.

    Raises FileFormatError for a format that is not supported, ConfigError for contents that do not fit.
    """
    for weight, recipe in recipes.items():
        parts = [Packed(file.read(name), file.place(name).format) for name in recipe.sources]
        yield weight, build(weight, recipe, parts)


def has_draft(file: GgufFile, config: ModelConfig) -> bool:
    """Whether the draft layer of such a model is in the file."""
    return has_mtp({name: place.shape for name, place in file.tensors.items()}, config.num_hidden_layers)


def expert_index(file: GgufFile, config: ModelConfig, blocks: Sequence[int] | None = None) -> ExpertIndex:
    """Where every routed expert of the given blocks lies; by default of the layers, and of the draft layer if any.

    Raises FileFormatError, naming the tensor, when one is missing, of another shape, or of a format that is not
    supported.
    """
    if blocks is None:
        blocks = range(config.num_hidden_layers + has_draft(file, config))
    return ExpertIndex(file.paths, tuple(_layer_index(file, config, block) for block in blocks))


def row_index(file: GgufFile, config: ModelConfig) -> RowIndex | None:
    """Where the n-gram table lies; None for a model without one. Raises as ``expert_index`` does."""
    if not config.ple_layer_ids:
        return None
    place = file.place("per_layer_token_embd.weight")
    width = config.ple_embed_dim // config.ngram_heads
    if len(place.shape) != 2 or place.shape[1] != width:
        raise _misfit(place, f"[rows, {width}]")
    return RowIndex(place.file, place.offset, place.shape[0], width, place.row_bytes, place.format.name)


def _layer_index(file: GgufFile, config: ModelConfig, block: int) -> LayerIndex:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    base = f"blk.{block}.ffn"
    down = _part(file, config, f"{base}_down_exps.weight", (hidden, width))
    if f"{base}_gate_up_exps.weight" in file.tensors:
        whole = _part(file, config, f"{base}_gate_up_exps.weight", (2 * width, hidden))
        return LayerIndex(*_gate_and_up(whole), down)
    gate, up = (_part(file, config, f"{base}_{name}_exps.weight", (width, hidden)) for name in ("gate", "up"))
    return LayerIndex(gate, up, down)


def _part(file: GgufFile, config: ModelConfig, name: str, shape: tuple[int, int]) -> PartIndex:
    place = file.place(name)
    if place.shape != (config.num_experts, *shape):
        raise _misfit(place, f"{(config.num_experts, *shape)}")
    length = shape[0] * place.row_bytes
    number = file.paths.index(place.file)
    return PartIndex.strided(place.format.name, shape, length, number, place.offset, length, config.num_experts)


def _gate_and_up(whole: PartIndex) -> Iterable[PartIndex]:
    """Both halves of a joined matrix, whose first rows are the gate's."""
    rows, inputs = whole.shape
    length = whole.length // 2
    for i in range(2):
        yield PartIndex(whole.format, (rows // 2, inputs), length, whole.files, whole.offsets + i * length)


def _misfit(place: TensorPlace, want: str) -> FileFormatError:
    where = f"{place.file}: tensor {place.name!r}"
    return FileFormatError(f"{where} has shape {place.shape}, needed {want}; the file is of another model or corrupt")
