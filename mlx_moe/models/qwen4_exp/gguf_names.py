"""From the tensors of a GGUF file (architecture ``qwen4exp``) to the canonical weights of ``sanitize.py``.

Pure: ``recipes`` says which file tensors each weight is made of, ``build`` makes it from their contents. Weights stay
packed wherever they can; the only ones that must be numbers are norms, biases and convolution kernels.

What the converter changed, and what is undone here: A_log is stored as -exp(A_log); the indexer's projection as two,
the draft layer's two input projections as one. What stays: norm weights are the factors already (1 was added), which is
what the model wants; the value heads of Gated DeltaNet are tiled (file head r * Hk + k is Hugging Face's head
k * ratio + r) on the rows of attn_qkv, attn_gate, ssm_alpha, ssm_beta, ssm_a, ssm_dt, ssm_conv1d and the columns of
ssm_out. Blocks of 256 weights cannot be permuted by head without quantising again, so nothing is permuted: a model
built from these weights runs with ``Spec(tiled=True)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import mlx.core as mx

from custom_kernels.ggml_blocks import BlockFormat, format_by_name, naive_dequantize
from mlx_moe.config import ConfigError, ModelConfig

Step = Literal["join", "numbers", "row", "log", "left", "right"]
"""join: as it is, or rows of several one after the other · numbers: unpacked · row: [H] or [1, H] as [1, H]
· log: log(-x) · left, right: that half of the input axis."""

_MIX = {
    "norm": ("hc_norm", "numbers"),
    "down": ("input_mix_weight_down", "join"),
    "up": ("input_mix_weight_up", "join"),
    "inject": ("block_inject_weight", "join"),
}
_ROOT: dict[str, tuple[str, Step]] = {
    "token_embd.weight": ("model.embed_tokens.weight", "join"),
    "output.weight": ("lm_head.weight", "join"),
    **{f"output_hc_{a}.weight": (f"model.hyper_connection_mixer.{b}.weight", s) for a, (b, s) in _MIX.items()},
}
_TABLE = "per_layer_token_embd.weight"
_LAYER: dict[str, tuple[str, Step]] = {
    **{f"hc_attn_{a}.weight": (f"attn_hyper_connection.{b}.weight", s) for a, (b, s) in _MIX.items()},
    **{f"hc_ffn_{a}.weight": (f"mlp_hyper_connection.{b}.weight", s) for a, (b, s) in _MIX.items()},
    "attn_qkv.weight": ("linear_attn.in_proj_qkv.weight", "join"),
    "attn_gate.weight": ("linear_attn.in_proj_z.weight", "join"),
    "ssm_alpha.weight": ("linear_attn.in_proj_a.weight", "join"),
    "ssm_beta.weight": ("linear_attn.in_proj_b.weight", "join"),
    "ssm_conv1d.weight": ("linear_attn.conv1d.weight", "numbers"),
    "ssm_dt.bias": ("linear_attn.dt_bias", "numbers"),
    "ssm_a": ("linear_attn.A_log", "log"),
    "ssm_norm.weight": ("linear_attn.norm.weight", "numbers"),
    "ssm_out.weight": ("linear_attn.out_proj.weight", "join"),
    "attn_q.weight": ("self_attn.q_proj.weight", "join"),
    "attn_k.weight": ("self_attn.k_proj.weight", "join"),
    "attn_v.weight": ("self_attn.v_proj.weight", "join"),
    "attn_output.weight": ("self_attn.o_proj.weight", "join"),
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "numbers"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "numbers"),
    "indexer.q_norm.weight": ("self_attn.indexer.q_layernorm.weight", "numbers"),
    "indexer.k_norm.weight": ("self_attn.indexer.k_layernorm.weight", "numbers"),
    "ffn_gate_inp.weight": ("mlp.gate.weight", "join"),
    "ffn_gate_up_exps.weight": ("mlp.experts.gate_up_proj.weight", "join"),
    "ffn_down_exps.weight": ("mlp.experts.down_proj.weight", "join"),
    "ffn_gate_inp_shexp.weight": ("mlp.shared_expert_gate.weight", "row"),
    "ffn_gate_shexp.weight": ("mlp.shared_expert.gate_proj.weight", "join"),
    "ffn_up_shexp.weight": ("mlp.shared_expert.up_proj.weight", "join"),
    "ffn_down_shexp.weight": ("mlp.shared_expert.down_proj.weight", "join"),
    "ple_key.weight": ("ple.key_proj.weight", "join"),
    "ple_value.weight": ("ple.value_proj.weight", "join"),
    "ple_conv1d.weight": ("ple.conv1d.weight", "numbers"),
    **{f"ple_norm_{a}.weight": (f"ple.norm_{a}.weight", "numbers") for a in ("key", "query", "conv")},
}
_JOINED = {
    ("indexer.q_proj.weight", "indexer.k_proj.weight"): "self_attn.indexer.index_qk_proj.weight",
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"): "mlp.experts.gate_up_proj.weight",
}
_DRAFT: dict[str, tuple[str, Step]] = {
    "nextn.enorm.weight": ("mtp.pre_fc_norm_embedding.weight", "numbers"),
    "nextn.hnorm.weight": ("mtp.pre_fc_norm_hidden.weight", "numbers"),
    **{f"nextn.hc_head_{a}.weight": (f"mtp.hyper_connection_mixer.{b}.weight", s) for a, (b, s) in _MIX.items()},
}
_EH_PROJ = "nextn.eh_proj.weight"
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(.+)")


class Packed(NamedTuple):
    """Contents of a tensor: numbers of the shape [..., n], or blocks as uint8 [..., row_bytes], and their format."""

    data: mx.array
    format: BlockFormat

    def numbers(self) -> mx.array:
        """[..., n] in a floating-point type."""
        return naive_dequantize(self.data, self.format) if self.data.dtype == mx.uint8 else self.data


@dataclass(frozen=True)
class Recipe:
    """What a weight is made of: tensors of the file, and what is done with them."""

    sources: tuple[str, ...]
    step: Step


def recipes(names: Iterable[str], config: ModelConfig) -> dict[str, Recipe]:
    """How every weight is made, by canonical name.

    Args:
        names: all tensors of the file. Of a file that holds the draft layer alone (with copies of what it shares with
            the model) only the draft layer's weights are given.

    Raises ConfigError when a tensor has no place in the model, when half of a pair is missing, or when a weight is
    there in two layouts.
    """
    names = set(names)
    out: dict[str, Recipe] = {}
    for name in sorted(names):
        for weight, recipe in _of_tensor(name, names, config):
            if weight in out:
                raise ConfigError(f"{weight} is in the file twice, as {name} and as {out[weight].sources[0]}")
            out[weight] = recipe
    draft = f"blk.{config.num_hidden_layers}.{_EH_PROJ}" in names
    return _draft_layer(out) if draft and not any(name.startswith("blk.0.") for name in names) else out


def _draft_layer(found: dict[str, Recipe]) -> dict[str, Recipe]:
    """The draft layer's weights of a file that holds it alone, where its final mix may be called as the model's is."""
    model, own = "model.hyper_connection_mixer.", "mtp.hyper_connection_mixer."
    mix = {weight.replace(model, own): recipe for weight, recipe in found.items() if weight.startswith(model)}
    return mix | {weight: recipe for weight, recipe in found.items() if weight.startswith("mtp.")}


def is_streamed(weight: str) -> bool:
    """Routed experts and n-gram tables, which need not be in memory."""
    return ".mlp.experts." in weight or ".ngram_embedding." in weight


def build(weight: str, recipe: Recipe, parts: Sequence[Packed]) -> Packed:
    """A weight from the contents of its recipe's sources, lazily; packed like them where that is possible.

    Raises ConfigError, naming the weight, when the contents cannot be what they should be.
    """
    try:
        if recipe.step in ("left", "right"):
            return _half(parts[0], recipe.step)
        if recipe.step == "join":
            return _joined(parts)
        if recipe.step == "row":
            return Packed(parts[0].data.reshape(1, -1), parts[0].format)
        numbers = parts[0].numbers()
    except ValueError as error:
        raise ConfigError(f"{weight}: {', '.join(recipe.sources)} do not fit ({error})") from None
    if recipe.step == "log":
        if not mx.all(numbers < 0).item():
            raise ConfigError(f"{weight}: {recipe.sources[0]} holds numbers that are not below 0")
        numbers = mx.log(-numbers.astype(mx.float32))
    return _plain(numbers)


def _of_tensor(name: str, names: set[str], config: ModelConfig) -> list[tuple[str, Recipe]]:
    """The weights that a tensor is the first source of."""
    if name in _ROOT:
        weight, step = _ROOT[name]
        return [(weight, Recipe((name,), step))]
    if name == _TABLE and config.ple_layer_ids:
        base = f"model.layers.{config.ple_layer_ids[0] - 1}.ple.ple_embedding"
        return [(f"{base}.ngram_embedding.weight", Recipe((name,), "join"))]
    match = _BLOCK.fullmatch(name)
    if match and int(match[1]) <= config.num_hidden_layers:
        return _of_block(match, names, draft=int(match[1]) == config.num_hidden_layers)
    raise ConfigError(
        f"tensor {name[:120]!r} has no place in the model; the file needs a newer version of this package"
    )


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"tensor {name[:120]!r} has no place in the model; the file is of another model or too new")


def _of_block(match: re.Match[str], names: set[str], draft: bool) -> list[tuple[str, Recipe]]:
    name, block, suffix = match[0], match[1], match[2]
    base = "mtp.layers.0" if draft else f"model.layers.{block}"
    if draft and suffix in _DRAFT:
        weight, step = _DRAFT[suffix]
        return [(weight, Recipe((name,), step))]
    if draft and suffix == _EH_PROJ:
        halves = (("mtp.fc_embedding.weight", "left"), ("mtp.fc_hidden.weight", "right"))
        return [(weight, Recipe((name,), side)) for weight, side in halves]
    if suffix in _LAYER:
        weight, step = _LAYER[suffix]
        return [(f"{base}.{weight}", Recipe((name,), step))]
    for pair, weight in _JOINED.items():
        if suffix in pair:
            sources = tuple(f"blk.{block}.{part}" for part in pair)
            if missing := [source for source in sources if source not in names]:
                raise ConfigError(f"{missing[0]} is missing, which belongs to {name}; the file is incomplete")
            return [(f"{base}.{weight}", Recipe(sources, "join"))] if suffix == pair[0] else []
    raise ConfigError(
        f"tensor {name[:120]!r} has no place in the model; the file needs a newer version of this package"
    )


def _plain(numbers: mx.array) -> Packed:
    """Numbers with the format that says so."""
    names = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}
    return Packed(numbers, format_by_name(names[numbers.dtype]))


def _joined(parts: Sequence[Packed]) -> Packed:
    """Rows [..., rows, n] of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    if len({part.format for part in parts}) == 1:
        return Packed(mx.concatenate([part.data for part in parts], axis=-2), parts[0].format)
    return _plain(mx.concatenate([part.numbers().astype(mx.float32) for part in parts], axis=-2))


def _half(part: Packed, side: str) -> Packed:
    """Half of each row: bytes where a block ends in the middle, else numbers."""
    packed = part.data.dtype == mx.uint8
    weights = part.format.row_weights(part.data.shape[-1]) if packed else part.data.shape[-1]
    if weights % 2:
        raise ValueError(f"{weights} inputs are not two halves")
    if packed and weights // 2 % part.format.block_weights:
        part = _plain(part.numbers())
    middle = part.data.shape[-1] // 2
    return Packed(part.data[..., :middle] if side == "left" else part.data[..., middle:], part.format)
