"""GGUF files of the tiny checkpoints: what llama.cpp's converter makes of Hugging Face weights.

``tiled`` alone knows the order of the value heads; comparisons use it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from checkpoints import layer_types
from gguf_writer import Tensor, Typed, encode, packed
from mlx_moe.config import ModelConfig
from mlx_moe.models.qwen4_exp.sanitize import is_norm, sanitize
from mlx_moe.paging.ngram import NgramHash

Formats = Callable[[str], str]
"""The format of a GGUF tensor, by its name: F32, BF16 or Q8_0."""

_ROOT = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
_BLOCK = {
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.indexer.q_layernorm.weight": "indexer.q_norm.weight",
    "self_attn.indexer.k_layernorm.weight": "indexer.k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj.weight": "ffn_down_exps.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "ple.key_proj.weight": "ple_key.weight",
    "ple.value_proj.weight": "ple_value.weight",
    "ple.conv1d.weight": "ple_conv1d.weight",
    "ple.norm_key.weight": "ple_norm_key.weight",
    "ple.norm_query.weight": "ple_norm_query.weight",
    "ple.norm_conv.weight": "ple_norm_conv.weight",
}
_MIXERS = {"attn_hyper_connection": "hc_attn", "mlp_hyper_connection": "hc_ffn"}
_MIX = {
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}


def q8_0_matrices(name: str) -> str:
    """Matrices as Q8_0; what must be plain numbers, and routers and the n-gram table, as F32."""
    plain = ("conv1d", "per_layer", "ffn_gate_inp", "inject")
    return "F32" if any(part in name for part in plain) else "Q8_0"


def head_order(config: ModelConfig) -> np.ndarray:
    """Hugging Face's value head at each place of a GGUF file."""
    keys, ratio = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    return np.array([k * ratio + r for r in range(ratio) for k in range(keys)])


def tiled(name: str, array: mx.array, config: ModelConfig) -> mx.array:
    """A canonical weight with its value heads in GGUF's order; other weights as they are."""
    if ".linear_attn." not in name or ".linear_attn.norm." in name:
        return array
    order, wide = head_order(config), config.linear_value_head_dim
    rows = mx.array((order[:, None] * wide + np.arange(wide)).reshape(-1))
    if "out_proj" in name:
        return array[:, rows]
    if "in_proj_z" in name:
        return array[rows]
    if "in_proj_qkv" in name or "conv1d" in name:
        start = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return mx.concatenate([array[:start], array[start:][rows]])
    return array[mx.array(order)]  # in_proj_a, in_proj_b, A_log, dt_bias


def tiny_metadata(raw: Mapping[str, Any], mtp: bool = False) -> dict[str, Any]:
    """The metadata of a tiny configuration, without a tokenizer."""
    t, config = raw["text_config"], ModelConfig.from_dict(raw)
    full = [kind == "full_attention" for kind in layer_types(t)] + [True] * mtp
    keys = {
        "block_count": len(full),
        "context_length": t["max_position_embeddings"],
        "embedding_length": t["hidden_size"],
        "attention.head_count": t["num_attention_heads"],
        "attention.head_count_kv": t["num_key_value_heads"],
        "attention.key_length": t["head_dim"],
        "attention.value_length": t["head_dim"],
        "attention.layer_norm_rms_epsilon": t["rms_norm_eps"],
        "rope.freq_base": t["rope_parameters"]["rope_theta"],
        "rope.dimension_count": config.rotary_dim,
        "rope.dimension_sections": Typed("[i32]", [2, 1, 1, 0]),
        "expert_count": t["num_experts"],
        "expert_used_count": t["num_experts_per_tok"],
        "expert_feed_forward_length": t["moe_intermediate_size"],
        "expert_shared_feed_forward_length": t["shared_expert_intermediate_size"],
        "ssm.conv_kernel": t["linear_conv_kernel_dim"],
        "ssm.state_size": t["linear_key_head_dim"],
        "ssm.group_count": t["linear_num_key_heads"],
        "ssm.time_step_rank": t["linear_num_value_heads"],
        "ssm.inner_size": t["linear_num_value_heads"] * t["linear_value_head_dim"],
        "attention.recurrent_layers": [not kind for kind in full],
        "hyper_connection.count": t["hc_count"],
        "hyper_connection.low_rank": t["hc_lowrank"],
        "attention.indexer.head_count": t["indexer_n_heads"],
        "attention.indexer.key_length": t["indexer_head_dim"],
        "attention.indexer.top_k": t["indexer_budget"],
        "attention.compress_ratios": Typed("[i32]", [t["indexer_compress_ratio"] * kind for kind in full]),
        **_ple_keys(config),
        **({"nextn_predict_layers": 1} if mtp else {}),
    }
    return {"general.architecture": "qwen4exp", **{f"qwen4exp.{key}": value for key, value in keys.items()}}


def _ple_keys(config: ModelConfig) -> dict[str, Any]:
    if not config.ple_layer_ids:
        return {}
    table = NgramHash.from_config(config, 0)
    return {
        "ple.layers": Typed("[i32]", [config.ple_layer_ids[0] - 1]),
        "ple.ngram_size": config.ngram_size,
        "ple.heads_per_ngram": config.heads_per_ngram,
        "ple.conv_kernel": config.ple_conv_kernel_size,
        "ple.eos_token_id": config.eos_token_ids[0],
        "ple.layer_multipliers": Typed("[u64]", table.multipliers),
        "ple.head_vocab_sizes": Typed("[u64]", table.sizes),
        "ple.head_offsets": Typed("[u64]", table.offsets),
        "embedding_length_per_layer_input": config.ple_embed_dim // config.ngram_heads,
    }


def tiny_tensors(
    raw: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    formats: Formats = lambda name: "F32",
    fused: bool = False,
) -> dict[str, Tensor]:
    """The tensors of Hugging Face weights (``checkpoints.random_weights``); ``fused`` joins gate and up experts."""
    config = ModelConfig.from_dict(raw)
    canonical = sanitize({name: mx.array(value) for name, value in weights.items()}, config, "raw")
    out: dict[str, Tensor] = {}
    for name, array in canonical.items():
        for target, value in _converted(name, tiled(name, array, config), config, fused):
            out[target] = stored(value, "F32" if is_norm(name) or value.ndim < 2 else formats(target))
    if "mtp.fc_hidden.weight" in canonical:
        target = f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight"
        halves = [canonical[f"mtp.{name}.weight"] for name in ("fc_embedding", "fc_hidden")]
        out[target] = stored(mx.concatenate(halves, axis=1), formats(target))
    return out


def stored(array: mx.array, format: str) -> Tensor:
    """A float32 array in one of the formats, rounded."""
    if format == "Q8_0":
        return packed(q8_0(array), "Q8_0")
    return packed(array.astype({"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}[format]))


def q8_0(array: mx.array) -> mx.array:
    """Q8_0 blocks, uint8 [..., row_bytes]: the largest of 32 weights becomes 127."""
    x = np.array(array.astype(mx.float32)).reshape(*array.shape[:-1], -1, 32)
    d = (np.abs(x).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    codes = np.round(x / np.maximum(d.astype(np.float32), 1e-9)).clip(-127, 127).astype(np.int8)
    blocks = np.concatenate([d.view(np.uint8), codes.view(np.uint8)], axis=-1)
    return mx.array(blocks.reshape(*array.shape[:-1], -1))


def _converted(name: str, array: mx.array, config: ModelConfig, fused: bool) -> list[tuple[str, mx.array]]:
    """GGUF names and arrays of a canonical weight."""
    if name in _ROOT:
        return [(_ROOT[name], array)]
    if name.startswith(("mtp.fc_", "mtp.pre_fc_norm_")):
        target = {"embedding": "enorm", "hidden": "hnorm"}[name.split(".")[1].rsplit("_", 1)[1]]
        block = f"blk.{config.num_hidden_layers}.nextn"
        return [] if ".fc_" in name else [(f"{block}.{target}.weight", array)]
    if ".hyper_connection_mixer." in name or name.startswith("mtp.hyper"):
        base = f"blk.{config.num_hidden_layers}.nextn.hc_head" if name.startswith("mtp.") else "output_hc"
        return [(f"{base}_{_MIX[name.split('.')[-2]]}.weight", array)]
    if ".ngram_embedding." in name:
        return [("per_layer_token_embd.weight", array)]
    parts = name.split(".")
    block = f"blk.{config.num_hidden_layers if parts[0] == 'mtp' else parts[2]}"
    rest = name.split(".layers.")[1].split(".", 1)[1]
    if parts[3] in _MIXERS:
        return [(f"{block}.{_MIXERS[parts[3]]}_{_MIX[parts[4]]}.weight", array)]
    if rest == "self_attn.indexer.index_qk_proj.weight":
        q = config.indexer_n_heads * config.indexer_head_dim
        return [(f"{block}.indexer.q_proj.weight", array[:q]), (f"{block}.indexer.k_proj.weight", array[q:])]
    if rest == "mlp.experts.gate_up_proj.weight":
        gate, up = mx.split(array, 2, axis=1)
        pair = [(f"{block}.ffn_gate_exps.weight", gate), (f"{block}.ffn_up_exps.weight", up)]
        return [(f"{block}.ffn_gate_up_exps.weight", array)] if fused else pair
    if rest == "linear_attn.A_log":
        array = -mx.exp(array)
    return [(f"{block}.{_BLOCK[rest]}", array)]


def write_gguf(
    path: Path, raw: Mapping[str, Any], weights: Mapping[str, np.ndarray], mtp: bool = False, **options: Any
) -> Path:
    """A tiny model as one GGUF file; options are those of ``tiny_tensors``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(tiny_metadata(raw, mtp), tiny_tensors(raw, weights, **options)))
    return path
