"""The published model's geometry as one GGUF file: every tensor in its place, and holes instead of contents."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints import tiny_config
from custom_kernels.ggml_blocks import format_by_name
from gguf_models import tiny_metadata
from gguf_writer import Tensor, encode

H, S, LOW, E, WIDE, LAYERS = 2560, 4 * 2560, 320, 512, 640, 48
REAL = {
    "hidden_size": H,
    "vocab_size": 248320,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": E,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": WIDE,
    "shared_expert_intermediate_size": WIDE,
    "hc_lowrank": LOW,
    "ple_embed_dim": H,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "max_position_embeddings": 262144,
    "eos_token_id": 248044,
}
_XXS = (1, 4, 9, 10, 11, 14, 18, 19, 27, 29, 30)

Experts = Callable[[int], tuple[str, str]]
"""Formats of gate and up, and of down, by layer."""
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def mixed(layer: int) -> tuple[str, str]:
    """ISTA-DASLab's "IQ2_XS": three formats of gate and up, so three sizes of records."""
    return ("IQ1_M" if layer in (8, 13, 37) else "IQ2_XXS" if layer in _XXS else "IQ2_S"), "Q2_0"


def real_config(**changes: Any) -> dict[str, Any]:
    """Its config.json."""
    return tiny_config(**{**REAL, **changes})


def write_real(path: Path, experts: Experts = mixed, mtp: bool = True) -> Path:
    """Write the file; it takes no room on the disk."""
    offset, tensors = 0, {}
    for name, (kind, shape) in _shapes(experts, mtp).items():
        format = format_by_name(kind)
        tensors[name] = Tensor(tuple(reversed(shape)), format.type_id, b"", offset)
        offset += math.prod(shape[:-1]) * format.row_bytes(shape[-1])
        offset += -offset % 32
    path.write_bytes(encode(tiny_metadata(real_config(), mtp=mtp), tensors))
    os.truncate(path, path.stat().st_size + offset)
    return path


def _shapes(experts: Experts, mtp: bool) -> Shapes:
    out: Shapes = {"token_embd.weight": ("Q6_K", (248320, H)), "output.weight": ("Q6_K", (248320, H))}
    out |= {f"output_hc_{name}": value for name, value in _mixer().items()}
    out["per_layer_token_embd.weight"] = ("IQ4_NL", (320_001_536, 160))
    for i in range(LAYERS + mtp):
        out |= {f"blk.{i}.{name}": value for name, value in _block(i, *experts(i)).items()}
    if mtp:
        nextn = {"eh_proj.weight": ("Q6_K", (H, 2 * H)), "enorm.weight": ("F32", (H,)), "hnorm.weight": ("F32", (S,))}
        nextn |= {f"hc_head_{name}": value for name, value in _mixer().items()}
        out |= {f"blk.{LAYERS}.nextn.{name}": value for name, value in nextn.items()}
    return out


def _mixer() -> Shapes:
    return {"norm.weight": ("F32", (S,)), "down.weight": ("Q6_K", (LOW, S)), "up.weight": ("Q8_0", (S, LOW))}


def _block(i: int, gate_up: str, down: str) -> Shapes:
    out: Shapes = {}
    for part in ("attn", "ffn"):
        out |= {f"hc_{part}_{name}": value for name, value in _mixer().items()}
        out[f"hc_{part}_inject.weight"] = ("F32", (4, S))
    out |= _attention() if i % 4 == 3 or i == LAYERS else _delta()
    out |= {f"ffn_{name}_exps.weight": (gate_up, (E, WIDE, H)) for name in ("gate", "up")}
    out["ffn_down_exps.weight"] = (down, (E, H, WIDE))
    out |= {"ffn_gate_inp.weight": ("F32", (E, H)), "ffn_gate_inp_shexp.weight": ("F32", (H,))}
    out |= {f"ffn_{name}_shexp.weight": ("Q6_K", (WIDE, H)) for name in ("gate", "up")}
    out["ffn_down_shexp.weight"] = ("Q8_0", (H, WIDE))
    return {**out, **(_ple() if i == 1 else {})}


def _delta() -> Shapes:
    return {
        "attn_qkv.weight": ("Q6_K", (10240, H)), "attn_gate.weight": ("Q6_K", (6144, H)),
        "ssm_alpha.weight": ("F32", (48, H)), "ssm_beta.weight": ("F32", (48, H)), "ssm_dt.bias": ("F32", (48,)),
        "ssm_a": ("F32", (48,)), "ssm_conv1d.weight": ("F32", (10240, 4)), "ssm_norm.weight": ("F32", (128,)),
        "ssm_out.weight": ("Q6_K", (H, 6144)),
    }  # fmt: skip


def _attention() -> Shapes:
    return {
        "attn_q.weight": ("Q6_K", (24 * 512, H)), "attn_k.weight": ("Q6_K", (512, H)),
        "attn_v.weight": ("Q6_K", (512, H)), "attn_output.weight": ("Q6_K", (H, 6144)),
        "attn_q_norm.weight": ("F32", (256,)), "attn_k_norm.weight": ("F32", (256,)),
        "indexer.q_proj.weight": ("Q6_K", (512, H)), "indexer.k_proj.weight": ("Q6_K", (128, H)),
        "indexer.q_norm.weight": ("F32", (128,)), "indexer.k_norm.weight": ("F32", (128,)),
    }  # fmt: skip


def _ple() -> Shapes:
    norms: Shapes = {f"ple_norm_{name}.weight": ("F32", (S,)) for name in ("key", "query", "conv")}
    return {
        **norms,
        "ple_key.weight": ("Q6_K", (S, H)),
        "ple_value.weight": ("Q6_K", (H, H)),
        "ple_conv1d.weight": ("F32", (S, 4)),
    }
