"""The weights of a model by canonical name, wherever they live: checks, and putting them in their places.

Knows modules and arrays, and no file: ``Origin`` says what messages call it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from custom_kernels.ggml_blocks import BlockFormat
from mlx_moe.config import ConfigError, ModelConfig
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.models.layers import Linear, PackedWeight
from mlx_moe.models.qwen4_exp import Model
from mlx_moe.models.qwen4_exp import sanitize as names
from mlx_moe.paging.ngram import NgramHash

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
"""What a model may compute in."""
_KEEP_FLOAT32 = ("A_log", "dt_bias")


@dataclass(frozen=True)
class Origin:
    """What messages call the source of weights.

    Attributes:
        name: of the folder or file.
        config: what the weights have to fit.
        file_of: the file of a weight, by canonical name.
    """

    name: str
    config: str
    file_of: Callable[[str], str]


def packed_modules(model: Model) -> Iterable[tuple[str, PackedWeight]]:
    """(canonical path, module) of every weight that can be packed: the model's, the experts' and the tables'."""
    for root, module in _roots(model):
        for path, child in module.named_modules():
            if isinstance(child, PackedWeight):
                yield root(path), child


def named_parameters(model: Model) -> dict[str, mx.array]:
    """Every weight by its canonical name; experts in an arena and tables in a file are not among them."""
    return {root(name): tensor for root, module in _roots(model) for name, tensor in tree_flatten(module.parameters())}


def kernels_of(model: Model) -> set[tuple[str, str]]:
    """(op, variant) of the kernels that the formats of the weights and the two sources bring."""
    found = {*model._experts.kernels, *model._rows.kernels}
    for _, module in packed_modules(model):
        if module.format is not None:
            found |= {(op, module.format.name) for op in _ops(module)}
    return found


def _ops(module: PackedWeight) -> tuple[str, ...]:
    """Linear layers unpack for prompts only; tables always do."""
    return ("block_gemv", "block_dequantize") if isinstance(module, Linear) else ("block_dequantize",)


def _roots(model: Model) -> list[tuple[Callable[[str], str], nn.Module]]:
    """The modules that hold weights, each with the map from its own paths to canonical names."""
    layers, ples = model.config.num_hidden_layers, model.config.ple_layer_ids

    def expert(path: str) -> str:
        index, rest = path.removeprefix("layers.").split(".", 1) if path.count(".") > 1 else (path, "")
        base = "mtp.layers.0" if int(index) == layers else f"model.layers.{index}"
        return f"{base}.mlp.experts.{rest}"

    def table(path: str) -> str:
        index, *rest = path.removeprefix("tables.").split(".")
        return ".".join([f"model.layers.{ples[int(index)] - 1}.ple.ple_embedding.ngram_embedding", *rest])

    roots: list[tuple[Callable[[str], str], nn.Module]] = [(lambda path: path, model)]
    if isinstance(model._experts, nn.Module):
        roots.append((expert, model._experts))
    if isinstance(model._rows, nn.Module):
        roots.append((table, model._rows))
    return roots


def put(model: Model, weights: dict[str, mx.array], origin: Origin, dtype: mx.Dtype) -> None:
    """Put every weight in its place, in the type to compute in, and empty ``weights``.

    Packed modules have taken on their shapes before. Raises FileFormatError when any name, shape or type does not fit.
    """
    _check_names(named_parameters(model), weights, origin)
    _check_types(model, weights, origin)
    for root, module in _roots(model):
        own = [name for name, _ in tree_flatten(module.parameters())]
        module.load_weights([(name, cast(root(name), weights.pop(root(name)), dtype)) for name in own], strict=True)


def expect_blocks(module: PackedWeight, weight: str, format: BlockFormat, dtype: mx.Dtype) -> None:
    """A module expects blocks of this format. Raises ConfigError, naming the weight, when they are not whole."""
    try:
        module.expect_blocks(format, dtype)
    except ValueError as error:
        raise ConfigError(f"{weight} does not fit its metadata ({error})") from None


def expect_packing(model: Model, weights: Mapping[str, mx.array], origin: Origin, dtype: mx.Dtype) -> None:
    """Modules whose scales are in the file expect the packed shapes; bits and group size follow from those."""
    section = model.config.quantization
    for path, module in packed_modules(model):
        packed, scales = weights.get(f"{path}.weight"), weights.get(f"{path}.scales")
        if packed is None or scales is None:
            continue
        if section is None:
            raise ConfigError(f"{path}.scales is in {origin.name}, but config.json has no quantization section")
        own = section.get(path)
        mode = own.get("mode", "affine") if isinstance(own, Mapping) else section.get("mode", "affine")
        inputs = module.weight.shape[-1]
        if not scales.ndim == packed.ndim == module.weight.ndim or not scales.size or inputs % scales.shape[-1]:
            raise FileFormatError(misfit(f"{path}.scales", scales, module.weight.shape, origin))
        packing = {"group_size": inputs // scales.shape[-1], "bits": 32 * packed.shape[-1] // inputs, "mode": mode}
        try:
            module.expect(packing, dtype)
        except ValueError as error:
            raise FileFormatError(f"{origin.name}: {path} cannot be unpacked as {packing} ({error})") from None


def cast(name: str, tensor: mx.array, dtype: mx.Dtype) -> mx.array:
    """A weight in the type that it is kept in when the model computes in ``dtype``; packed ones as they are."""
    if not mx.issubdtype(tensor.dtype, mx.floating):
        return tensor
    return tensor.astype(mx.float32 if _stays_float32(name) else dtype)


def compute_dtype(model: Model) -> mx.Dtype:
    """The type that a loaded model computes in; packed weights need not show it."""
    types = {tensor.dtype for name, tensor in named_parameters(model).items() if not _stays_float32(name)}
    return next((dtype for dtype in DTYPES if dtype in types), mx.bfloat16)


def evaluate(model: Model) -> None:
    """Read and convert every weight now, layer by layer, so that temporaries stay small."""
    for name, tensor in named_parameters(model).items():
        try:
            mx.eval(tensor)
        except RuntimeError as error:
            raise FileFormatError(f"{name} cannot be read ({error})") from None
    mx.synchronize()


def check_hashes(constants: Mapping[str, mx.array], config: ModelConfig) -> None:
    """Hash constants in a file, by canonical name, must be those that the configuration gives."""
    for name, tensor in constants.items():
        layer = re.match(r"model\.layers\.(\d{1,4})\.ple\.", name)
        index = config.ple_index(int(layer[1])) if layer else None
        if index is None:
            raise ConfigError(f"{name} is in the file, but not of a layer that ple_layer_ids names")
        table = NgramHash.from_config(config, index)
        want = {
            "layer_multipliers": table.multipliers,
            "ngram_heads_vocab_sizes": table.sizes,
            "ngram_heads_offsets": table.offsets,
        }[name.rsplit(".", 1)[1]]
        if tensor.ndim != 1 or tuple(tensor.tolist()) != want:
            raise ConfigError(f"{name} in the file is not what seed and ngram_vocab_size_base of its configuration say")


def type_name(dtype: mx.Dtype) -> str:
    """As ``float32``."""
    return str(dtype).removeprefix("mlx.core.")


def misfit(name: str, tensor: mx.array, want: tuple[int, ...], origin: Origin) -> str:
    """That a weight has another shape than the wanted one."""
    return f"{name} has shape {tuple(tensor.shape)}, needed {tuple(want)} ({origin.file_of(name)})"


def _stays_float32(name: str) -> bool:
    return names.is_norm(name) or name.endswith(("linear_attn.norm.weight", *_KEEP_FLOAT32))


def _check_names(want: Mapping[str, mx.array], got: Mapping[str, mx.array], origin: Origin) -> None:
    problems = []
    missing, surplus = sorted(want.keys() - got.keys()), sorted(got.keys() - want.keys())
    if missing:
        problems.append(f"{len(missing)} tensor(s) missing, first {', '.join(missing[:3])}")
    if surplus:
        where = origin.file_of(surplus[0])
        problems.append(f"{len(surplus)} unknown tensor(s), first {', '.join(surplus[:3])} ({where})")
    shapes = [name for name in want.keys() & got.keys() if want[name].shape != got[name].shape]
    for name in sorted(shapes)[:3]:
        problems.append(misfit(name, got[name], want[name].shape, origin))
    if problems:
        raise FileFormatError(f"{origin.name}: weights do not fit {origin.config}: {'; '.join(problems)}")


def _check_types(model: Model, weights: Mapping[str, mx.array], origin: Origin) -> None:
    """Packed weights are integers, everything else is a floating-point number."""
    integers = {}
    for path, module in packed_modules(model):
        if module.format is not None:
            integers[f"{path}.weight"] = mx.uint8
        if module.packing is not None:
            integers[f"{path}.weight"] = mx.uint32
            if module.packing["mode"] != "affine":
                integers[f"{path}.scales"] = mx.uint8
    for name, tensor in weights.items():
        want = integers.get(name)
        if tensor.dtype != want if want is not None else not mx.issubdtype(tensor.dtype, mx.floating):
            raise FileFormatError(
                f"{origin.name}: {name} holds {type_name(tensor.dtype)}, needed "
                f"{'floating-point numbers' if want is None else type_name(want)} ({origin.file_of(name)})"
            )
