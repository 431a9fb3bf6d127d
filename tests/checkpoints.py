"""Tiny seeded checkpoints in every published layout: configurations, weights and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

EOS = 127


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A nested config.json of the architecture, small enough for seconds; ``changes`` go into text_config."""
    text: dict[str, Any] = {
        "model_type": "qwen4_exp_text",
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "hc_count": 4,
        "hc_lowrank": 32,
        "ple_layer_ids": [2],
        "ple_embed_dim": 64,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 61,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 4,
        "seed": 1234,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "output_gate_type": "sigmoid",
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    text.update(changes)
    return {"model_type": "qwen4_exp", "architectures": ["Qwen4ExpForConditionalGeneration"], "text_config": text}


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd_streams": {"hc_count": 3, "output_gate_type": None},
    "two_ple": {"ple_layer_ids": [1, 3], "ple_embed_dim": 96},
    "wide_values": {"linear_value_head_dim": 24, "linear_key_head_dim": 16},
    "ratio_8": {"indexer_compress_ratio": 8, "indexer_budget": 40},
    "five_layers": {"num_hidden_layers": 5, "num_experts_per_tok": 1, "eos_token_id": [EOS, 126]},
    "four_grams": {"ngram_size": 4, "ple_embed_dim": 96, "heads_per_ngram": 2, "linear_conv_kernel_dim": 3},
}
"""Shapes that differ from the published one where code likes to assume; changes for ``tiny_config``."""


def layer_types(text: dict[str, Any]) -> list[str]:
    """The layer pattern of a text_config."""
    default = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(text["num_hidden_layers"])]
    return text.get("layer_types") or default


class _Maker:
    """Draws the tensors of a checkpoint, in a fixed order, scaled so that logits vary."""

    def __init__(self, text: dict[str, Any], seed: int):
        self.t, self.rng, self.out = text, np.random.default_rng(seed), {}

    def matrix(self, name: str, *shape: int) -> None:
        self.out[name] = self.rng.standard_normal(shape, dtype=np.float32) * (1.6 / shape[-1] ** 0.5)

    def norm(self, name: str, size: int, mean: float = 0.0) -> None:
        self.out[name] = (mean + 0.2 * self.rng.standard_normal(size)).astype(np.float32)

    def mix(self, p: str, inject: bool = True) -> None:
        wide, low = self.t["hc_count"] * self.t["hidden_size"], self.t["hc_lowrank"]
        self.norm(f"{p}.hc_norm.weight", wide)
        self.matrix(f"{p}.input_mix_weight_down.weight", low, wide)
        self.matrix(f"{p}.input_mix_weight_up.weight", wide, low)
        if inject:
            self.matrix(f"{p}.block_inject_weight.weight", self.t["hc_count"], wide)

    def linear_attention(self, p: str) -> None:
        t, h = self.t, self.t["hidden_size"]
        hv = t["linear_num_value_heads"]
        width = hv * t["linear_value_head_dim"]
        channels = 2 * t["linear_num_key_heads"] * t["linear_key_head_dim"] + width
        self.matrix(f"{p}.in_proj_qkv.weight", channels, h)
        self.matrix(f"{p}.in_proj_z.weight", width, h)
        self.matrix(f"{p}.in_proj_b.weight", hv, h)
        self.matrix(f"{p}.in_proj_a.weight", hv, h)
        conv = 0.4 * self.rng.standard_normal((channels, 1, t["linear_conv_kernel_dim"]))
        self.out[f"{p}.conv1d.weight"] = conv.astype(np.float32)
        self.norm(f"{p}.A_log", hv, mean=1.0)
        self.norm(f"{p}.dt_bias", hv, mean=1.0)
        self.norm(f"{p}.norm.weight", t["linear_value_head_dim"], mean=1.0)
        self.matrix(f"{p}.out_proj.weight", h, width)

    def attention(self, p: str) -> None:
        t, h, d = self.t, self.t["hidden_size"], self.t["head_dim"]
        self.matrix(f"{p}.q_proj.weight", t["num_attention_heads"] * 2 * d, h)
        self.matrix(f"{p}.k_proj.weight", t["num_key_value_heads"] * d, h)
        self.matrix(f"{p}.v_proj.weight", t["num_key_value_heads"] * d, h)
        self.matrix(f"{p}.o_proj.weight", h, t["num_attention_heads"] * d)
        self.norm(f"{p}.q_norm.weight", d)
        self.norm(f"{p}.k_norm.weight", d)
        self.matrix(f"{p}.indexer.index_qk_proj.weight", (t["indexer_n_heads"] + 1) * t["indexer_head_dim"], h)
        self.norm(f"{p}.indexer.q_layernorm.weight", t["indexer_head_dim"])
        self.norm(f"{p}.indexer.k_layernorm.weight", t["indexer_head_dim"])

    def moe(self, p: str) -> None:
        t, h = self.t, self.t["hidden_size"]
        self.matrix(f"{p}.gate.weight", t["num_experts"], h)
        for e in range(t["num_experts"]):
            self.mlp(f"{p}.experts.{e}", t["moe_intermediate_size"])
        self.mlp(f"{p}.shared_expert", t["shared_expert_intermediate_size"])
        self.matrix(f"{p}.shared_expert_gate.weight", 1, h)

    def mlp(self, p: str, width: int) -> None:
        h = self.t["hidden_size"]
        self.matrix(f"{p}.gate_proj.weight", width, h)
        self.matrix(f"{p}.up_proj.weight", width, h)
        self.matrix(f"{p}.down_proj.weight", h, width)

    def ple(self, p: str, index: int) -> None:
        t, h, e = self.t, self.t["hidden_size"], self.t["ple_embed_dim"]
        wide = t["hc_count"] * h
        heads = (t["ngram_size"] - 1) * t["heads_per_ngram"]
        rows = sum(_primes(t["ngram_vocab_size_base"], heads, index))
        divisor = t["make_ngram_vocab_size_divisible_by"]
        rows = -(-rows // divisor) * divisor
        table = (0.5 * self.rng.standard_normal((rows, e // heads))).astype(np.float32)
        for i, part in enumerate(np.array_split(table, t["split_ngram_parts"])):
            self.out[f"{p}.ple_embedding.ngram_embedding.shard_{i}.weight"] = part
        self.matrix(f"{p}.key_proj.weight", wide, e)
        self.matrix(f"{p}.value_proj.weight", h, e)
        for name in ("key", "query", "conv"):
            self.norm(f"{p}.norm_{name}.weight", wide)
        conv = 0.4 * self.rng.standard_normal((wide, 1, t["ple_conv_kernel_size"]))
        self.out[f"{p}.conv1d.weight"] = conv.astype(np.float32)

    def layer(self, p: str, kind: str) -> None:
        if kind == "linear_attention":
            self.linear_attention(f"{p}.linear_attn")
        else:
            self.attention(f"{p}.self_attn")
        self.moe(f"{p}.mlp")
        self.mix(f"{p}.attn_hyper_connection")
        self.mix(f"{p}.mlp_hyper_connection")


def _primes(base: int, count: int, index: int) -> list[int]:
    found, n = [], base
    while len(found) < count * (index + 1):
        if n > 1 and all(n % d for d in range(2, int(n**0.5) + 1)):
            found.append(n)
        n += 1
    return found[count * index :]


def random_weights(raw: dict[str, Any], seed: int = 0, mtp: bool = False) -> dict[str, np.ndarray]:
    """Float32 weights under Hugging Face's per-expert names (``model.…``, ``lm_head``, ``mtp.…``), raw norms."""
    t = raw["text_config"]
    make = _Maker(t, seed)
    make.out["model.embed_tokens.weight"] = make.rng.standard_normal((t["vocab_size"], t["hidden_size"])).astype("f4")
    for i, kind in enumerate(layer_types(t)):
        if i + 1 in t["ple_layer_ids"]:
            make.ple(f"model.layers.{i}.ple", sorted(t["ple_layer_ids"]).index(i + 1))
        make.layer(f"model.layers.{i}", kind)
    make.mix("model.hyper_connection_mixer", inject=False)
    make.matrix("lm_head.weight", t["vocab_size"], t["hidden_size"])
    if mtp:
        make.norm("mtp.pre_fc_norm_embedding.weight", t["hidden_size"])
        make.norm("mtp.pre_fc_norm_hidden.weight", t["hc_count"] * t["hidden_size"])
        make.matrix("mtp.fc_embedding.weight", t["hidden_size"], t["hidden_size"])
        make.matrix("mtp.fc_hidden.weight", t["hidden_size"], t["hidden_size"])
        make.layer("mtp.layers.0", "full_attention")
        make.mix("mtp.hyper_connection_mixer", inject=False)
    return make.out


def checksum(weights: dict[str, np.ndarray]) -> float:
    """Tells whether weights drawn again are those that stored logits belong to."""
    return float(sum(np.abs(value).sum(dtype=np.float64) for value in weights.values()))


def fuse_experts(weights: dict[str, np.ndarray], experts: int) -> dict[str, np.ndarray]:
    """The layout with ``experts.gate_up_proj`` and ``experts.down_proj`` per layer."""
    out = {name: value for name, value in weights.items() if ".mlp.experts." not in name}
    for base in sorted({name.split(".mlp.experts.")[0] for name in weights if ".mlp.experts." in name}):
        p = f"{base}.mlp.experts"
        gate_up = [
            np.concatenate([weights[f"{p}.{e}.gate_proj.weight"], weights[f"{p}.{e}.up_proj.weight"]])
            for e in range(experts)
        ]
        out[f"{p}.gate_up_proj"] = np.stack(gate_up)
        out[f"{p}.down_proj"] = np.stack([weights[f"{p}.{e}.down_proj.weight"] for e in range(experts)])
    return out


def with_prefix(weights: dict[str, Any]) -> dict[str, Any]:
    """Names as in multimodal files: ``model.language_model.…``."""
    return {
        "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name: value
        for name, value in weights.items()
    }


def write(
    folder: Path, raw: dict[str, Any], weights: dict[str, Any], dtype: mx.Dtype = mx.float32, files: int = 1
) -> Path:
    """A model folder. Float arrays are stored in ``dtype``; others and mx arrays as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    arrays = {
        name: value if isinstance(value, mx.array) else mx.array(value).astype(dtype) if value.dtype == np.float32
        else mx.array(value)
        for name, value in weights.items()
    }  # fmt: skip
    names = sorted(arrays)
    shards = [names[i::files] for i in range(files)]
    for i, shard in enumerate(shards):
        name = "model.safetensors" if files == 1 else f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        mx.save_safetensors(str(folder / name), {key: arrays[key] for key in shard}, {"format": "pt"})
    return folder


def tokens(count: int, seed: int = 0, vocab: int = 128) -> np.ndarray:
    """Random ids with EOS at 10 and 25, where the n-gram window is cut."""
    ids = np.random.default_rng(seed).integers(0, vocab - 2, count).astype(np.int32)
    ids[[i for i in (10, 25) if i < count]] = EOS
    return ids
