"""The composition root: the only place where model, weights and expert source meet."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_moe.config import ConfigError, ModelConfig, read_config
from mlx_moe.formats.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from mlx_moe.formats.hub import resolve
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.models.layers import PackedWeight, on_cpu
from mlx_moe.models.qwen4_exp import Model
from mlx_moe.models.qwen4_exp import sanitize as names
from mlx_moe.paging.ngram import NgramHash
from mlx_moe.paging.resident import ResidentExperts, ResidentRows
from mlx_moe.verdicts import require_kernels

logger = logging.getLogger(__name__)

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
DEMO = Path(__file__).parent / "demo"
"""The demonstration model that comes with the package."""

KERNELS = frozenset({("gdn_step", ""), ("gdn_commit", ""), ("moce_route", "")})
"""(op, variant) of every kernel that a model uses; each is checked once per machine."""

_KEEP_FLOAT32 = ("A_log", "dt_bias")
_NAMED_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_NOT_PACKED = ("mlp.gate", "shared_expert_gate", "block_inject_weight", "in_proj_a", "in_proj_b")


def load_model(
    path: str | Path | None = None,
    dtype: mx.Dtype | None = None,
    *,
    model_config: Mapping[str, Any] | None = None,
    lazy: bool = False,
    revision: str | None = None,
    norm_convention: str = "auto",
    mtp_norm_per_stream: bool = False,
) -> tuple[Model, dict[str, Any]]:
    """Load a model without its tokenizer.

    Args:
        path: a model folder or a Hub repository; None is the demonstration model of the package.
        dtype: float32, bfloat16 or float16 to compute in; None keeps what the file holds, and is float32 where MLX
            has no GPU, since its CPU products are many times slower in 16 bits.
        model_config: entries that override config.json.
        lazy: leave the weights to be read when they are first used, by the loading thread.
        revision: of the Hub repository.
        norm_convention: "auto", or "raw" or "folded" for files that do not say it clearly.
        mtp_norm_per_stream: llama.cpp's reading of the MTP layer's hidden norm; changes draft acceptance only.

    Returns:
        The model, evaluated and usable from any thread, and the raw contents of config.json.

    Raises:
        ConfigError, FileFormatError, FileNotFoundError: each in one line that names the thing and the remedy.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; allowed: float32, bfloat16, float16")
    folder = model_folder(path, revision)
    raw = {**read_config(folder), **(model_config or {})}
    config = ModelConfig.from_dict(raw)
    checkpoint = read_checkpoint(folder)
    _report_vision(checkpoint)
    _check_hashes(checkpoint, config)
    dtype = dtype or _default_dtype(raw, checkpoint)
    convention = raw.get("norm_convention", "auto") if norm_convention == "auto" else norm_convention
    weights = names.sanitize(checkpoint.tensors, config, convention, dtype)
    checkpoint.tensors.clear()  # from here on only the model holds what it needs, so memory stays near the result
    model = _build(config, any(name.startswith("mtp.") for name in weights), mtp_norm_per_stream)
    _assign(model, weights, checkpoint, dtype)
    if not lazy:
        _evaluate(model)
    require_kernels(KERNELS)
    model.bind()
    return model, raw


def model_folder(path: str | Path | None, revision: str | None = None) -> Path:
    """The local folder of a model: the package's own for None, a folder, or a Hub repository that can be run.

    Of a repository config.json is fetched and checked first, so that nothing large is downloaded in vain.
    """
    if path is None:
        if not (DEMO / "config.json").exists():
            raise FileNotFoundError("this installation has no demonstration model; name a model folder or repository")
        return DEMO
    return resolve(path, revision, check=lambda folder: ModelConfig.from_path(folder))


def save_model(folder: str | Path, model: Model, config: Mapping[str, Any]) -> None:
    """Write a loaded (perhaps quantised) model as a folder that ``load_model`` reads.

    Args:
        config: the raw configuration that ``load_model`` returned; sections that describe the packing are rewritten.
    """
    raw = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    raw["norm_convention"] = "folded"
    raw["dtype"] = _type_name(_compute_dtype(model))
    packed = {path: module.packing for path, module in packed_modules(model) if module.packing is not None}
    if packed:
        common = max(packed.values(), key=list(packed.values()).count)
        different = {path: packing for path, packing in packed.items() if packing != common}
        unpacked = {path: False for path, module in packed_modules(model) if module.packing is None}
        raw["quantization"] = {**common, **different, **unpacked}
    write_checkpoint(folder, named_parameters(model), raw)


def quantize_model(
    model: Model,
    bits: int = 4,
    group_size: int = 64,
    mode: str = "affine",
    predicate: Callable[[str, PackedWeight], bool | Mapping[str, Any]] | None = None,
) -> Model:
    """Pack the large matrices of a model with ``mx.quantize``, in place.

    Routers, scalar gates and matrices whose rows do not divide into groups stay as they are. ``predicate(path,
    weight)`` may return False, True or its own {bits, group_size, mode}.
    """
    default = {"group_size": group_size, "bits": bits, "mode": mode}
    for path, module in packed_modules(model):
        choice = not path.endswith(_NOT_PACKED) if predicate is None else predicate(path, module)
        packing = dict(choice) if isinstance(choice, Mapping) else default
        if choice and module.packing is None and module.weight.shape[-1] % packing["group_size"] == 0:
            module.pack(packing)
    _evaluate(model)
    return model


def packed_modules(model: Model) -> Iterable[tuple[str, PackedWeight]]:
    """(canonical path, module) of every weight that can be packed: the model's, the experts' and the tables'."""
    for root, module in _roots(model):
        for path, child in module.named_modules():
            if isinstance(child, PackedWeight):
                yield root(path), child


def named_parameters(model: Model) -> dict[str, mx.array]:
    """Every weight by its canonical name, wherever it lives."""
    return {root(name): tensor for root, module in _roots(model) for name, tensor in tree_flatten(module.parameters())}


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


def _build(config: ModelConfig, mtp: bool, per_stream: bool) -> Model:
    experts = ResidentExperts(config, config.num_hidden_layers + mtp)
    model = Model(config, experts, ResidentRows(config), mtp=mtp, mtp_norm_per_stream=per_stream)
    model.eval()
    return model


def _report_vision(checkpoint: Checkpoint) -> None:
    vision = sum(map(names.is_vision, checkpoint.tensors))
    if vision:
        logger.warning("%s: skipped %d tensors of the image encoder; text only", checkpoint.folder, vision)


def _check_hashes(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Hash constants in the file must be those that the configuration gives."""
    for name, tensor in names.hash_buffers(checkpoint.tensors).items():
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
            raise ConfigError(f"{name} in the file is not what seed and ngram_vocab_size_base of config.json give")


def _default_dtype(raw: Mapping[str, Any], checkpoint: Checkpoint) -> mx.Dtype:
    stored = _file_dtype(raw, checkpoint)
    if on_cpu() and stored != mx.float32:
        logger.info("computing in float32 on the CPU; the file holds %s", stored)
        return mx.float32
    return stored


def _file_dtype(raw: Mapping[str, Any], checkpoint: Checkpoint) -> mx.Dtype:
    """What the file computes in: the type of its embedding, else the one that config.json names."""
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(("embed_tokens.scales", "embed_tokens.weight")) and tensor.dtype in DTYPES:
            return tensor.dtype
    text = raw.get("text_config") or {}
    named = raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    return _NAMED_DTYPES.get(str(named), mx.bfloat16)


def _assign(model: Model, weights: dict[str, mx.array], checkpoint: Checkpoint, dtype: mx.Dtype) -> None:
    """Put every weight in its place, in the type to compute in; all names and shapes must fit."""
    _expect_packing(model, weights, checkpoint, dtype)
    _check_names(named_parameters(model), weights, checkpoint)
    _check_types(model, weights, checkpoint)
    for root, module in _roots(model):
        own = [name for name, _ in tree_flatten(module.parameters())]
        module.load_weights([(name, _cast(root(name), weights.pop(root(name)), dtype)) for name in own], strict=True)


def _cast(name: str, tensor: mx.array, dtype: mx.Dtype) -> mx.array:
    if not mx.issubdtype(tensor.dtype, mx.floating):
        return tensor
    return tensor.astype(mx.float32 if _stays_float32(name) else dtype)


def _stays_float32(name: str) -> bool:
    return names.is_norm(name) or name.endswith(("linear_attn.norm.weight", *_KEEP_FLOAT32))


def _compute_dtype(model: Model) -> mx.Dtype:
    """The type that a loaded model computes in; packed weights need not show it."""
    types = {tensor.dtype for name, tensor in named_parameters(model).items() if not _stays_float32(name)}
    return next((dtype for dtype in DTYPES if dtype in types), mx.bfloat16)


def _expect_packing(model: Model, weights: Mapping[str, mx.array], checkpoint: Checkpoint, dtype: mx.Dtype) -> None:
    """Modules whose scales are in the file expect the packed shapes; bits and group size follow from those."""
    section = model.config.quantization
    for path, module in packed_modules(model):
        packed, scales = weights.get(f"{path}.weight"), weights.get(f"{path}.scales")
        if packed is None or scales is None:
            continue
        if section is None:
            raise ConfigError(f"{path}.scales is in {checkpoint.folder}, but config.json has no quantization section")
        own = section.get(path)
        mode = own.get("mode", "affine") if isinstance(own, Mapping) else section.get("mode", "affine")
        inputs = module.weight.shape[-1]
        if not scales.ndim == packed.ndim == module.weight.ndim or not scales.size or inputs % scales.shape[-1]:
            raise FileFormatError(_misfit(f"{path}.scales", scales, module.weight.shape, checkpoint))
        packing = {"group_size": inputs // scales.shape[-1], "bits": 32 * packed.shape[-1] // inputs, "mode": mode}
        try:
            module.expect(packing, dtype)
        except ValueError as error:
            raise FileFormatError(f"{checkpoint.folder}: {path} cannot be unpacked as {packing} ({error})") from None


def _check_names(want: Mapping[str, mx.array], got: Mapping[str, mx.array], checkpoint: Checkpoint) -> None:
    problems = []
    missing, surplus = sorted(want.keys() - got.keys()), sorted(got.keys() - want.keys())
    if missing:
        problems.append(f"{len(missing)} tensor(s) missing, first {', '.join(missing[:3])}")
    if surplus:
        where = _file_of(surplus[0], checkpoint)
        problems.append(f"{len(surplus)} unknown tensor(s), first {', '.join(surplus[:3])} ({where})")
    shapes = [name for name in want.keys() & got.keys() if want[name].shape != got[name].shape]
    for name in sorted(shapes)[:3]:
        problems.append(_misfit(name, got[name], want[name].shape, checkpoint))
    if problems:
        raise FileFormatError(f"{checkpoint.folder}: weights do not fit config.json: {'; '.join(problems)}")


def _check_types(model: Model, weights: Mapping[str, mx.array], checkpoint: Checkpoint) -> None:
    """Packed weights are integers, everything else is a floating-point number."""
    integers = {}
    for path, module in packed_modules(model):
        if module.packing is not None:
            integers[f"{path}.weight"] = mx.uint32
            if module.packing["mode"] != "affine":
                integers[f"{path}.scales"] = mx.uint8
    for name, tensor in weights.items():
        want = integers.get(name)
        if tensor.dtype != want if want is not None else not mx.issubdtype(tensor.dtype, mx.floating):
            raise FileFormatError(
                f"{checkpoint.folder}: {name} holds {_type_name(tensor.dtype)}, needed "
                f"{'floating-point numbers' if want is None else _type_name(want)} ({_file_of(name, checkpoint)})"
            )


def _type_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _misfit(name: str, tensor: mx.array, want: tuple[int, ...], checkpoint: Checkpoint) -> str:
    return f"{name} has shape {tuple(tensor.shape)}, needed {tuple(want)} ({_file_of(name, checkpoint)})"


def _file_of(name: str, checkpoint: Checkpoint) -> str:
    """The file that a canonical name came from."""
    for source, file in checkpoint.files.items():
        if names.canonical_name(source) == name:
            return file
    return "file unknown"


def _evaluate(model: Model) -> None:
    """Read and convert every weight now, layer by layer, so that temporaries stay small."""
    for name, tensor in named_parameters(model).items():
        try:
            mx.eval(tensor)
        except RuntimeError as error:
            raise FileFormatError(f"{name} cannot be read ({error})") from None
    mx.synchronize()
