"""Qwen3.8-Flash-Next as published: its shape, and bytes of files that people run, for plans without any file.

Counts of weights follow from the shape; records are those of ISTA-DASLab's GGUF file of class IQ2_XS (gate and up in
IQ2_S, IQ2_XXS or IQ1_M by layer, down in Q2_0), 2.3 bits per weight on average.
"""

from __future__ import annotations

from typing import Any

from mlx_moe.config import ModelConfig
from mlx_moe.paging.sizes import ModelSizes

LAYERS = 48
DENSE_READ_WEIGHTS, DENSE_WEIGHTS = 4_310_000_000, 4_950_000_000
"""Dense weights that a token reads, and those in memory, with the input embedding; without the draft layer."""
HEAD_WEIGHTS = 248_320 * 2560
DRAFT_WEIGHTS = 90_000_000
"""Of the draft layer beside its experts: two projections of 2560 x 2560, attention and its index, gated residuals,
router, shared expert."""
DENSE_BITS = {"6-bit": 6.1, "4-bit": 4.5}
"""Bits per dense weight: of that file on average; of MLX's 4-bit groups of 64 with scale and bias."""
TABLE_BYTES, ROW_BYTES = 28_800_000_000, 1440
_IQ2_S, _IQ2_XXS, _IQ1_M = 1_510_400, 1_305_600, 1_177_600
_XXS_LAYERS, _M_LAYERS = frozenset((1, 4, 9, 10, 11, 14, 18, 19, 27, 29, 30)), frozenset((8, 13, 37))
_TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 248_320,
    "hidden_size": 2560,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 128,
    "seed": 1234,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "hidden_act": "silu",
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 248_044,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
}


def published_config() -> ModelConfig:
    """The text model's configuration."""
    return ModelConfig.from_dict(_TEXT)


def mean_record_bytes() -> int:
    """Of one expert, over the trunk's layers."""
    return sum(published_sizes(8, drafts=False).records) // LAYERS


def published_sizes(dense_bits: float, drafts: bool = True) -> ModelSizes:
    """Sizes with so many bits per dense weight. drafts: whether the draft layer is loaded."""
    records = [_IQ1_M if i in _M_LAYERS else _IQ2_XXS if i in _XXS_LAYERS else _IQ2_S for i in range(LAYERS + drafts)]
    return ModelSizes(
        config=published_config(),
        dense_bytes=int(DENSE_WEIGHTS * dense_bits / 8),
        dense_token_bytes=int(DENSE_READ_WEIGHTS * dense_bits / 8),
        mtp_bytes=drafts * int(DRAFT_WEIGHTS * dense_bits / 8),
        records=tuple(records),
        row_bytes=ROW_BYTES,
        table_bytes=TABLE_BYTES,
    )
