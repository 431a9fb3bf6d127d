"""The composition root of model folders: where model, weights and sources meet (of GGUF files: gguf_loading.py)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_moe.config import ModelConfig, read_config
from mlx_moe.formats.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from mlx_moe.formats.hub import resolve
from mlx_moe.formats.pack import is_pack
from mlx_moe.gguf_loading import is_gguf, load_gguf
from mlx_moe.hf_loading import folder_sources
from mlx_moe.models.layers import PackedWeight, on_cpu
from mlx_moe.models.qwen4_exp import Model
from mlx_moe.models.qwen4_exp import sanitize as names
from mlx_moe.models.qwen4_exp.gguf_names import is_streamed
from mlx_moe.pack_loading import load_pack
from mlx_moe.paging.budget import Paging
from mlx_moe.paging.plan import Wanted
from mlx_moe.paging.reader import THREADS
from mlx_moe.paging.token_reads import NO_REPLAY
from mlx_moe.routing_settings import Moce, moce_settings
from mlx_moe.verdicts import require_kernels
from mlx_moe.weights import (
    DTYPES,
    Origin,
    check_hashes,
    compute_dtype,
    evaluate,
    expect_packing,
    kernels_of,
    named_parameters,
    packed_modules,
    put,
    type_name,
)

logger = logging.getLogger(__name__)

DEMO = Path(__file__).parent / "demo"
"""The demonstration model that comes with the package."""

KERNELS = frozenset({("gdn_step", ""), ("gdn_commit", "")})
"""(op, variant) of the kernels that every model uses; each is checked once per machine."""

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
    mtp: str | Path | None = "auto",
    mtp_norm_per_stream: bool = False,
    memory: str | int | None = None,
    expert_slots: int | None = None,
    resident: bool = False,
    io_threads: int = THREADS,
    read_ahead: bool = True,
    read_by_token: bool = False,
    io: str | None = None,
    moce: Moce = None,
    prefill_step_size: int = Wanted.prefill_step_size,
    usage: bool = True,
    seed_residency: str | None = None,
    eviction: str | None = None,
    record_routing: str | Path | None = None,
) -> tuple[Model, dict[str, Any]]:
    """Load a model without its tokenizer.

    Experts that do not fit into memory stay in their files and are read when they are needed; without ``moce`` output
    does not depend on how many stand in memory. ``model.close()``, or ``with`` the model, ends the threads. Experts
    of a model folder are arrays in memory where all fit so and none of ``memory``, ``expert_slots``, ``resident`` and
    ``moce`` is given, or where ``mx.quantize`` packed them.

    Args:
        path: a model folder, a pack, a GGUF file, a folder of one GGUF model's shards, or a Hub repository; None is the
            demonstration model of the package.
        dtype: float32, bfloat16 or float16 to compute in; None keeps what the file holds (of GGUF files and packs
            bfloat16), and is float32 where MLX has no GPU, since its CPU products are many times slower in 16 bits.
        model_config: entries that override config.json.
        lazy: leave the weights to be read when they are first used, by the loading thread; not of GGUF files or packs,
            nor where experts stream.
        revision: of the Hub repository.
        norm_convention: "auto", or "raw" or "folded" for model folders that do not say it clearly.
        mtp: the draft layer: "auto" is the model's own, or that of a GGUF file beside the model; None is none; a GGUF
            file takes it from there.
        mtp_norm_per_stream: llama.cpp's reading of the MTP layer's hidden norm; changes draft acceptance only.
        memory: this process's ceiling, for all of its models, as "10GB" or in bytes; None is what the machine has. What
            models that are loaded already hold is not available to this one.
        expert_slots: experts per layer in memory; None is as many as fit.
        resident: all experts in memory, or an error.
        io_threads: that read experts.
        read_ahead: read what the next layer will probably need.
        read_by_token: read also, for all layers as soon as a token is known, what it used in earlier text, as was
            learned: more experts are in memory when they are needed, and more bytes are read. Not with record_routing.
        io: "direct" past the page cache, with a warning where that cannot be, or "buffered"; None is direct, quietly.
        moce: prefer experts in memory (cache-aware routing); output then depends on how many there are and on what was
            in memory before. True takes the model's own settings (generation_config.json, else MoceConfig's), a mapping
            changes some of those. None is the plain router.
        prefill_step_size: prompt tokens per pass that memory is planned for; name the same to what generates.
        usage: where experts stream, learn which are used and remember it in a small file, beside the model or in the
            user's cache folder; False neither reads nor writes it.
        seed_residency: which of them are in memory first: "usage" by what was learned and by the model's static
            profile, "profile" by that alone, or "empty". None is "usage", and "profile" with moce or without usage.
        eviction: who leaves memory first: "frequency", who is used least, or "lru", who was used longest ago. None is
            "frequency" with usage and "lru" without.
        record_routing: a file for what the routers say, until the model is closed (scripts/replay_routing.py); one of
            that name is replaced.

    Returns:
        The model, evaluated and usable from any thread, and the raw contents of config.json.

    Raises:
        ConfigError, FileFormatError, FileNotFoundError: each in one line that names the thing and the remedy.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; allowed: float32, bfloat16, float16")
    if record_routing is not None and read_by_token:
        raise ValueError(NO_REPLAY)
    if record_routing is not None and not Path(record_routing).resolve().parent.is_dir():
        raise ValueError(f"record_routing is {record_routing}, whose folder does not exist; make it first")
    source = model_folder(path, revision)
    packed = is_gguf(source) or is_pack(source)
    if packed and (lazy or norm_convention != "auto"):
        option = "lazy" if lazy else "norm_convention"
        raise ValueError(f"{source}: {option} cannot be used with GGUF files and packs; leave it out")
    if not is_gguf(source) and mtp not in ("auto", None):
        raise ValueError(f"mtp is {mtp}, but the draft layer of a model folder is the folder's own; leave it out")
    paging = Paging(
        memory=memory,
        expert_slots=expert_slots,
        resident=resident,
        io_threads=io_threads,
        read_ahead=read_ahead,
        read_by_token=read_by_token,
        io=io,
        moce=moce_settings(source, moce),
        prefill_step_size=prefill_step_size,
        usage=usage,
        seed_residency=seed_residency,
        eviction=eviction,
    )
    if is_gguf(source):
        model, raw = load_gguf(source, _packed_dtype(dtype), model_config, mtp, mtp_norm_per_stream, paging)
    elif packed:
        model, raw = load_pack(source, _packed_dtype(dtype), model_config, mtp is not None, mtp_norm_per_stream, paging)
    else:
        raw = {**read_config(source), **(model_config or {})}
        options = _FolderOptions(norm_convention, mtp is not None, mtp_norm_per_stream, lazy, paging)
        model = _load_folder(source, raw, dtype, options)
    if not lazy:
        evaluate(model)
    require_kernels(KERNELS | kernels_of(model))
    model.bind()
    if record_routing is not None:
        model.record_routing(record_routing)
    return model, raw


def model_folder(path: str | Path | None, revision: str | None = None) -> Path:
    """Where a model is here: the package's own for None, a folder or GGUF file, or a Hub repository that can be run.

    Of a repository its configuration is fetched and checked first, so that nothing large is downloaded in vain.
    """
    if path is None:
        if not (DEMO / "config.json").exists():
            raise FileNotFoundError("this installation has no demonstration model; name a model folder or repository")
        return DEMO
    local = Path(path)
    with contextlib.suppress(RuntimeError):  # ~name of nobody
        local = local.expanduser()
    if is_gguf(local):
        return local
    if local.suffix == ".gguf":
        raise FileNotFoundError(f"{local}: no such file")
    return resolve(path, revision, check=lambda folder: ModelConfig.from_path(folder))


def save_model(folder: str | Path, model: Model, config: Mapping[str, Any]) -> None:
    """Write a loaded (perhaps quantised) model as a folder that ``load_model`` reads.

    Args:
        config: the raw configuration that ``load_model`` returned; sections that describe the packing are rewritten.

    Raises ValueError for a model of a GGUF file.
    """
    _refuse_blocks(model, "saved as a folder")
    raw = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    raw["norm_convention"] = "folded"
    raw["dtype"] = type_name(compute_dtype(model))
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
    weight)`` may return False, True or its own {bits, group_size, mode}. Raises ValueError for a model of a GGUF file.
    """
    _refuse_blocks(model, "quantised again")
    default = {"group_size": group_size, "bits": bits, "mode": mode}
    for path, module in packed_modules(model):
        choice = not path.endswith(_NOT_PACKED) if predicate is None else predicate(path, module)
        packing = dict(choice) if isinstance(choice, Mapping) else default
        if choice and module.packing is None and module.weight.shape[-1] % packing["group_size"] == 0:
            module.pack(packing)
    evaluate(model)
    return model


def _refuse_blocks(model: Model, what: str) -> None:
    if not isinstance(model._experts, nn.Module):
        raise ValueError(
            f"a model whose experts stand in memory as their files have them cannot be {what}; load a model folder"
            " whose experts fit, without memory, expert_slots, resident and moce"
        )


@dataclass(frozen=True)
class _FolderOptions:
    """Of ``load_model``, those for folders of safetensors. mtp: whether to take the draft layer along."""

    norm_convention: str
    mtp: bool
    mtp_norm_per_stream: bool
    lazy: bool
    paging: Paging


def _load_folder(folder: Path, raw: Mapping[str, Any], dtype: mx.Dtype | None, options: _FolderOptions) -> Model:
    """The model of a folder of safetensors, its dense weights still lazy."""
    config = ModelConfig.from_dict(raw)
    checkpoint = read_checkpoint(folder)
    _report_vision(checkpoint)
    check_hashes(names.hash_buffers(checkpoint.tensors), config)
    dtype = dtype or _default_dtype(raw, checkpoint)
    draft = options.mtp and any(names.canonical_name(name).startswith("mtp.") for name in checkpoint.tensors)
    sources = folder_sources(folder, config, dtype, draft, options.paging, options.lazy)
    convention = raw.get("norm_convention", "auto") if options.norm_convention == "auto" else options.norm_convention
    weights = _weights(checkpoint, config, dtype, convention, sources.in_place)
    if not draft:
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")}
    model = Model(config, sources.experts, sources.rows, mtp=draft, mtp_norm_per_stream=options.mtp_norm_per_stream)
    model.eval()
    origin = Origin(str(checkpoint.folder), "config.json", lambda name: _file_of(name, checkpoint))
    expect_packing(model, weights, origin, dtype)
    put(model, weights, origin, dtype)
    if sources.in_place:
        sources.experts.fill()
    return model


def _weights(
    checkpoint: Checkpoint, config: ModelConfig, dtype: mx.Dtype, convention: str, in_place: bool
) -> dict[str, mx.array]:
    """Canonical weights, of which the checkpoint holds none any more. in_place: experts and rows are not among them."""
    tensors = checkpoint.tensors
    if in_place:
        tensors = {name: tensor for name, tensor in tensors.items() if not is_streamed(names.canonical_name(name))}
    weights = names.sanitize(tensors, config, convention, dtype)
    checkpoint.tensors.clear()  # from here on only the model holds what it needs, so memory stays near the result
    return weights


def _packed_dtype(dtype: mx.Dtype | None) -> mx.Dtype:
    """What to compute in with weights that are blocks, if the caller does not say."""
    return dtype or (mx.float32 if on_cpu() else mx.bfloat16)


def _report_vision(checkpoint: Checkpoint) -> None:
    vision = sum(map(names.is_vision, checkpoint.tensors))
    if vision:
        logger.warning("%s: skipped %d tensors of the image encoder; text only", checkpoint.folder, vision)


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


def _file_of(name: str, checkpoint: Checkpoint) -> str:
    """The file that a canonical name came from."""
    for source, file in checkpoint.files.items():
        if names.canonical_name(source) == name:
            return file
    return "file unknown"
