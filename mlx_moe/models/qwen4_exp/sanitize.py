"""From the names and layouts that checkpoints have to the ones that the model has.

``sanitize`` is a pure function of a dict of arrays, and applying it twice changes nothing. It does no I/O: arrays stay
lazy. Canonical names are Hugging Face's below ``model.``, ``lm_head.`` and ``mtp.``; experts are stacked as
``mlp.experts.{gate_up_proj,down_proj}.weight`` [E, out, in], n-gram shards joined, conv kernels [C, K], and norm
weights are the factor itself in float32 (see ``fold_norms``).
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import mlx.core as mx

from mlx_moe.config import ConfigError, ModelConfig

logger = logging.getLogger(__name__)

Weights = Mapping[str, mx.array]

_PREFIXES = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.mtp.", "mtp."),
    ("model.mtp.", "mtp."),
)
_VISION = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|scales|biases)$")
_STACKED = re.compile(r"(.*\.mlp)\.switch_mlp\.(gate|up|down)_proj\.(weight|scales|biases)$")
_FUSED = re.compile(r".*\.mlp\.experts\.(gate_up_proj|down_proj)$")
_SHARD = re.compile(r"(.*\.ngram_embedding)\.shard_(\d+)\.weight$")
_HASH = re.compile(r".*\.ple_embedding\.(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)$")
_NORM = re.compile(r".*(norm|norm_key|norm_query|norm_conv|pre_fc_norm_embedding|pre_fc_norm_hidden)\.weight$")
FP8_BLOCK = 128

RAW_BELOW, FOLDED_ABOVE = 0.45, 0.75
"""Mean norm weight of a file: raw (w - 1 stored) files measure 0 to 0.2, folded ones 1 to 1.2."""


def sanitize(
    weights: Weights, config: ModelConfig, norm_convention: str = "auto", dtype: mx.Dtype = mx.float32
) -> dict[str, mx.array]:
    """Canonical names and layouts.

    Args:
        weights: tensors of a checkpoint under any of the published names; FP8 tensors as uint8.
        config: the model's configuration.
        dtype: what FP8 tensors are decoded to.
        norm_convention: "auto" detects, "raw" adds one to the norm weights, "folded" leaves them.

    Raises:
        ConfigError: incomplete or uneven sets of experts or shards, FP8 without fitting scales, one tensor under two
            names, or a mixture of norm conventions.
    """
    out = _rename(weights)
    out = _dequantize_fp8(out, dtype)
    out = _stack_experts(out, config)
    out = _join_shards(out)
    out = {name: _squeeze_conv(name, tensor) for name, tensor in out.items()}
    return fold_norms(out, norm_convention)


def canonical_name(name: str) -> str:
    """The canonical name of the tensor that a file's tensor ends up in."""
    name = _common_prefix(name)
    name = re.sub(r"\.weight_scale(_inv)?$", ".weight", name)
    if match := _EXPERT.match(name) or _STACKED.match(name):
        base = match[1] if match.re is _EXPERT else match[1] + ".experts"
        part = "down_proj" if match[match.lastindex - 1] == "down" else "gate_up_proj"
        return f"{base}.{part}.{match[match.lastindex]}"
    if match := _SHARD.match(name):
        return match[1] + ".weight"
    return name + ".weight" if _FUSED.match(name) else name


def _common_prefix(name: str) -> str:
    """The name below ``model.``, ``lm_head.`` or ``mtp.``, whatever the file's own prefix."""
    for prefix, new in _PREFIXES:
        if name.startswith(prefix):
            return new + name[len(prefix) :]
    return name


def is_vision(name: str) -> bool:
    """Tensors of the image encoder, which the text model does not use."""
    return name.startswith(_VISION)


def hash_buffers(weights: Weights) -> dict[str, mx.array]:
    """The n-gram hash constants that a file carries, by canonical name."""
    return {name: tensor for name, tensor in _rename(weights, keep_hash=True).items() if _HASH.match(name)}


def _rename(weights: Weights, keep_hash: bool = False) -> dict[str, mx.array]:
    out = {}
    for name, tensor in weights.items():
        if is_vision(name):
            continue
        name = _common_prefix(name)
        if keep_hash or not _HASH.match(name):
            _add(out, name + ".weight" if _FUSED.match(name) else name, tensor)
    return out


def _add(out: dict[str, mx.array], name: str, tensor: mx.array) -> None:
    if name in out:
        raise ConfigError(f"{name} is in the checkpoint twice, under two names or in two layouts")
    out[name] = tensor


def _dequantize_fp8(weights: dict[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.array]:
    """F8_E4M3 bytes with one scale per 128 x 128 block, or one for all, become numbers, rounded once."""
    out = {}
    for name, tensor in weights.items():
        if name.endswith((".weight_scale_inv", ".weight_scale")):
            continue
        if tensor.dtype == mx.uint8 and name.endswith(".weight"):
            scale = weights.get(name + "_scale_inv")
            if scale is None:
                table = _SHARD.match(name)
                scale = weights.get(f"{table[1]}.weight_scale" if table else name + "_scale")
            if scale is None:
                raise ConfigError(f"{name} is FP8 (or bytes), but its weight_scale_inv or weight_scale is missing")
            tensor = _scaled_fp8(name, tensor, scale).astype(dtype)
        out[name] = tensor
    return out


def _scaled_fp8(name: str, tensor: mx.array, scale: mx.array) -> mx.array:
    scale = scale.astype(mx.float32)
    if scale.size == 1:
        scale = scale.reshape(())
    else:
        want = (*tensor.shape[:-2], *(-(-n // FP8_BLOCK) for n in tensor.shape[-2:]))
        if tensor.ndim < 2 or scale.shape != want:
            raise ConfigError(f"{name}: its FP8 scales have shape {scale.shape}; needed: {want}, or one for all")
        for axis in (-2, -1):
            scale = mx.repeat(scale, FP8_BLOCK, axis=axis)
        scale = scale[..., : tensor.shape[-2], : tensor.shape[-1]]
    return mx.from_fp8(tensor, dtype=mx.float32) * scale


def _stack_experts(weights: dict[str, mx.array], config: ModelConfig) -> dict[str, mx.array]:
    """Per-expert tensors, or mlx-lm's ``switch_mlp`` stacks, become gate_up_proj and down_proj."""
    out: dict[str, mx.array] = {}
    single: dict[tuple[str, str, str], dict[int, mx.array]] = defaultdict(dict)
    stacks: dict[tuple[str, str, str], mx.array] = {}
    for name, tensor in weights.items():
        if match := _EXPERT.match(name):
            single[match[1], match[3], match[4]][int(match[2])] = tensor
        elif match := _STACKED.match(name):
            stacks[match[1] + ".experts", match[2], match[3]] = tensor
        else:
            out[name] = tensor
    for (base, part, kind), experts in single.items():
        missing = sorted(set(range(config.num_experts)) - experts.keys())
        if missing or len(experts) > config.num_experts:
            what = f"expert {missing[0]} is missing" if missing else f"{len(experts)} experts"
            raise ConfigError(f"{base}.{part}_proj.{kind}: {what}; num_experts is {config.num_experts}")
        if (base, part, kind) in stacks:
            raise ConfigError(f"{base}.{part}_proj.{kind} is in the checkpoint twice, per expert and stacked")
        _check_even(f"{base}.{{}}.{part}_proj.{kind}", experts)
        stacks[base, part, kind] = mx.stack([experts[e] for e in range(config.num_experts)])
    for base, part, kind in list(stacks):
        if part == "down":
            _add(out, f"{base}.down_proj.{kind}", stacks[base, part, kind])
        elif part == "gate":
            gate, up = stacks[base, "gate", kind], stacks.get((base, "up", kind))
            if up is None or gate.ndim < 2 or gate.shape != up.shape:
                shapes = f"{gate.shape} and {'missing' if up is None else up.shape}"
                raise ConfigError(f"{base}: gate_proj.{kind} and up_proj.{kind} do not fit each other: {shapes}")
            _add(out, f"{base}.gate_up_proj.{kind}", mx.concatenate([gate, up], 1))
    return out


def _check_even(name: str, experts: Mapping[int, mx.array]) -> None:
    """Refuse experts of different shapes; ``name`` has a {} for the expert's number."""
    shapes = [tensor.shape for tensor in experts.values()]
    common = max(set(shapes), key=shapes.count)
    for e, tensor in sorted(experts.items()):
        if tensor.shape != common:
            raise ConfigError(f"{name.format(e)} has shape {tensor.shape}, the other experts {common}")


def _join_shards(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The n-gram table's shards, in the order of their numbers, become one table."""
    out: dict[str, mx.array] = {}
    tables: dict[str, dict[int, mx.array]] = defaultdict(dict)
    for name, tensor in weights.items():
        if match := _SHARD.match(name):
            tables[match[1]][int(match[2])] = tensor
        else:
            out[name] = tensor
    for base, shards in tables.items():
        if sorted(shards) != list(range(len(shards))):
            gap = min(set(range(len(shards))) - shards.keys())
            raise ConfigError(f"{base}: shard_{gap} is missing")
        if len({(tensor.ndim, *tensor.shape[1:]) for tensor in shards.values()}) > 1 or shards[0].ndim != 2:
            raise ConfigError(f"{base}: shards of different widths: {sorted({t.shape for t in shards.values()})[:4]}")
        _add(out, f"{base}.weight", mx.concatenate([shards[i] for i in range(len(shards))]))
    return out


def _squeeze_conv(name: str, tensor: mx.array) -> mx.array:
    """[C, 1, K] as in torch, or [C, K, 1] as in MLX, becomes [C, K]."""
    if not name.endswith("conv1d.weight") or tensor.ndim != 3:
        return tensor
    return tensor.squeeze(1) if tensor.shape[1] == 1 else tensor.squeeze(-1) if tensor.shape[2] == 1 else tensor


def is_norm(name: str) -> bool:
    """Zero-centred norms: every norm but the Gated DeltaNet's output norm."""
    return bool(_NORM.match(name)) and not name.endswith("linear_attn.norm.weight")


def fold_norms(weights: Weights, convention: str = "auto") -> dict[str, mx.array]:
    """Norm weights as float32 factors: 1 + w of raw files, w of files that hold the factor already.

    The wrong reading gives fluent nonsense, so a file that does not clearly follow one convention is refused.
    """
    if convention not in ("auto", "raw", "folded"):
        raise ConfigError(f"norm_convention is {convention!r}; allowed: auto, raw, folded")
    norms = {name: tensor.astype(mx.float32) for name, tensor in weights.items() if is_norm(name)}
    if convention == "auto":
        convention = detect_norm_convention(norms)
    if convention == "raw":
        norms = {name: tensor + 1 for name, tensor in norms.items()}
    return {**weights, **norms}


def detect_norm_convention(norms: Weights) -> str:
    """ "raw" or "folded" from the means of the norm weights. Raises ConfigError when it is unclear or mixed."""
    if not norms:
        return "folded"
    means = dict(zip(norms, mx.stack([tensor.mean() for tensor in norms.values()]).tolist(), strict=True))
    sizes = {name: tensor.size for name, tensor in norms.items()}
    overall = _weighted(means, sizes, norms)
    if RAW_BELOW < overall < FOLDED_ABOVE:
        raise ConfigError(_unclear(f"their mean is {overall:.2f}, between raw (0 to 0.2) and folded (1 to 1.2)"))
    verdict = "raw" if overall <= RAW_BELOW else "folded"
    if odd := _dissenters(means, sizes, verdict):
        raise ConfigError(_unclear(f"most are {verdict}, but {', '.join(odd[:3])} ({len(odd)} in all) are not"))
    logger.info("norm weights are %s (mean %.2f)", verdict, overall)
    return verdict


def _unclear(why: str) -> str:
    return f"norm weights do not follow one convention: {why}; give norm_convention raw or folded if you know better"


def _weighted(means: Mapping[str, float], sizes: Mapping[str, int], names: Iterable[str]) -> float:
    names = list(names)
    return sum(means[n] * sizes[n] for n in names) / sum(sizes[n] for n in names)


def _dissenters(means: Mapping[str, float], sizes: Mapping[str, int], verdict: str) -> list[str]:
    """Norms that follow the other convention: a part of the file, or one that stands out from its like.

    Single means vary in trained models, so a norm counts only where its own kind agrees with itself otherwise, where
    the MTP layer as a whole differs from the trunk, or where more than a tenth of all weights lie on the other side.
    """
    other = (lambda m: m > 0.85) if verdict == "raw" else (lambda m: m < 0.35)
    across = [name for name in means if other(means[name])]
    if sum(sizes[name] for name in across) > 0.1 * sum(sizes.values()):
        return across
    mtp = [name for name in means if name.startswith("mtp.")]
    if mtp and other(_weighted(means, sizes, mtp)):
        return mtp
    kinds = defaultdict(list)
    for name in means:
        kinds[re.sub(r"\d+", "#", name)].append(name)
    return [name for kind in kinds.values() for name in kind if _stands_out(name, kind, means) and other(means[name])]


def _stands_out(name: str, kind: list[str], means: Mapping[str, float]) -> bool:
    rest = sorted(means[other] for other in kind if other != name)
    if len(rest) < 2 or rest[-1] - rest[0] > 0.25:
        return False
    return abs(means[name] - rest[len(rest) // 2]) > 0.75
