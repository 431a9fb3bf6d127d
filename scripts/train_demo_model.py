"""The demonstration model: Qwen3.8-Flash-Next (`qwen4_exp`) with its MTP layer, as PyTorch modules for training.

Owns the configuration, the weights and the forward pass over whole sequences without a cache; `train_demo_ops` has the
arithmetic and the names of the dimensions. Knows nothing of data, optimizers, schedules or files. Attributes are named
after the checkpoint's keys, so `state_dict` needs no renaming except for the n-gram table (`train_demo_files`). The
compute type is that of the embedding matrix.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
import train_demo_ops as ops
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Text configuration under the field names of config.json. Every matrix has an input width divisible by 64."""

    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 1e6
    partial_rotary_factor: float = 0.25
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 8
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    num_experts: int = 40
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 64
    hc_count: int = 4
    hc_lowrank: int = 64
    ple_layer_ids: list[int] = field(default_factory=lambda: [2])
    ple_embed_dim: int = 512
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 4
    ngram_vocab_size_base: int = 4096
    make_ngram_vocab_size_divisible_by: int = 128
    split_ngram_parts: int = 4
    seed: int = 1234
    indexer_n_heads: int = 4
    indexer_kv_heads: int = 1
    indexer_head_dim: int = 32
    indexer_budget: int = 256
    indexer_compress_ratio: int = 4
    mtp_num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    eos_token_id: int = 0

    @property
    def layer_types(self) -> list[str]:
        """ "linear_attention" or "full_attention" (QSA) per layer."""
        every = self.full_attention_interval
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(self.num_hidden_layers)]

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def to_json(self) -> dict:
        """The content of a text-only config.json."""
        fields = asdict(self)
        half = self.rotary_dim // 2
        sections = [half - 2 * (half // 3) - (half % 3 == 2), half // 3 + (half % 3 == 2), half // 3]
        rope = dict(
            rope_type="default",
            rope_theta=fields.pop("rope_theta"),
            mrope_interleaved=True,
            partial_rotary_factor=fields.pop("partial_rotary_factor"),
            mrope_section=sections,
        )
        return dict(
            architectures=["Qwen4ExpForCausalLM"],
            model_type="qwen4_exp_text",
            dtype="bfloat16",
            **fields,
            layer_types=self.layer_types,
            rope_parameters=rope,
            norm_topk_prob=True,
            hidden_act="silu",
            output_gate_type="sigmoid",
            attention_bias=False,
            attention_dropout=0.0,
            tie_word_embeddings=False,
            bos_token_id=None,
            pad_token_id=None,
            use_cache=True,
            initializer_range=0.02,
            router_aux_loss_coef=0.001,
            output_router_logits=False,
        )


# ---------------------------------------------------------------- n-gram hashing (integers only)
def splitmix64_finaliser(z: int) -> int:
    """The output function of splitmix64 on a 64-bit integer."""
    mask = (1 << 64) - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def hash_multipliers(config: ModelConfig) -> list[int]:
    """One odd multiplier per place in the n-gram, so small that id * multiplier stays below 2^63."""
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    bound = (2**63 - 1) // config.vocab_size // 2
    draws = [splitmix64_finaliser((config.seed + gamma * (i + 2)) & mask) for i in range(config.ngram_size)]
    return [2 * (x % bound) + 1 for x in draws]


def hash_primes(config: ModelConfig) -> list[int]:
    """Rows per hash head: the primes from `ngram_vocab_size_base` on, order 2 first."""
    primes, n = [], config.ngram_vocab_size_base
    while len(primes) < config.heads_per_ngram * (config.ngram_size - 1):
        if n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1)):
            primes.append(n)
        n += 1
    return primes


# ---------------------------------------------------------------- blocks
class GatedResidual(nn.Module):
    """The weights of one stream mixer."""

    def __init__(self, config: ModelConfig, inject: bool = True):
        super().__init__()
        self.eps, width = config.rms_norm_eps, config.hc_count * config.hidden_size
        self.hc_norm = Norm(width)
        self.input_mix_weight_down = nn.Linear(width, config.hc_lowrank, bias=False)
        self.input_mix_weight_up = nn.Linear(config.hc_lowrank, width, bias=False)
        self.block_inject_weight = nn.Linear(width, config.hc_count, bias=False) if inject else None

    def forward(self, s: Tensor, y: Tensor | None = None, beta: Tensor | None = None):
        """See `connect`."""
        inject = None if self.block_inject_weight is None else self.block_inject_weight.weight
        return ops.connect(
            s,
            y,
            beta,
            self.hc_norm.weight,
            self.input_mix_weight_down.weight,
            self.input_mix_weight_up.weight,
            inject,
            self.eps,
        )


class Norm(nn.Module):
    """The weight of a (1 + w) norm: zeros."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule, from a zero state."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.c, H = config, config.hidden_size
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        self.in_proj_qkv = nn.Linear(H, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(H, values, bias=False)
        self.in_proj_b = nn.Linear(H, config.linear_num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(H, config.linear_num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(
            2 * keys + values, 2 * keys + values, config.linear_conv_kernel_dim, groups=2 * keys + values, bias=False
        )
        self.A_log = nn.Parameter(torch.zeros(config.linear_num_value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(config.linear_num_value_heads))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(config.linear_value_head_dim))
        self.out_proj = nn.Linear(values, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        c = self.c
        intra, query, transition, update = ops.gdn_chunks(
            x,
            self.in_proj_qkv.weight,
            self.in_proj_b.weight,
            self.in_proj_a.weight,
            self.conv1d.weight.squeeze(1),
            self.A_log,
            self.dt_bias,
            c.linear_num_key_heads,
            c.linear_key_head_dim,
            c.linear_value_head_dim,
        )
        states = ops.ChunkScan.apply(transition.flatten(1, 3), update.flatten(1, 3)).view_as(update)
        return ops.gdn_output(
            x, intra, query, states, self.in_proj_z.weight, self.norm.weight, self.out_proj.weight, c.rms_norm_eps
        )


class Indexer(nn.Module):
    """The weights of the QSA block selection."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        dim = config.indexer_head_dim
        self.index_qk_proj = nn.Linear(config.hidden_size, (config.indexer_n_heads + 1) * dim, bias=False)
        self.q_layernorm, self.k_layernorm = Norm(dim), Norm(dim)


class QsaAttention(nn.Module):
    """Grouped-query attention with an output gate, over all positions or over the blocks that the indexer picks."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.c, H, D = config, config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(H, config.num_attention_heads * D * 2, bias=False)
        self.k_proj = nn.Linear(H, config.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(H, config.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * D, H, bias=False)
        self.q_norm, self.k_norm = Norm(D), Norm(D)
        self.indexer = Indexer(config)

    def scores(self, x: Tensor, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `ops.index_scores`; x is taken as a constant."""
        c, i = self.c, self.indexer
        return ops.index_scores(
            x.detach(),
            rows,
            i.index_qk_proj.weight,
            i.q_layernorm.weight,
            i.k_layernorm.weight,
            cos,
            sin,
            c.indexer_n_heads,
            c.indexer_compress_ratio,
            c.rms_norm_eps,
        )

    def forward(self, x: Tensor, run: Run) -> Tensor:
        c, T, (cos, sin) = self.c, x.shape[1], run.rope
        ratio = c.indexer_compress_ratio
        q, k, v, gate = ops.qsa_project(
            x,
            self.q_proj.weight,
            self.k_proj.weight,
            self.v_proj.weight,
            self.q_norm.weight,
            self.k_norm.weight,
            cos,
            sin,
            c.head_dim,
            c.rms_norm_eps,
        )
        group = c.num_attention_heads // c.num_key_value_heads
        wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if run.sparse:
            with torch.no_grad():
                scores, _ = self.scores(x, torch.arange(T, device=x.device), cos, sin)
                mask = ops.block_mask(scores, c.indexer_budget // ratio, ratio, T)
            o = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=mask)
        else:
            o = F.scaled_dot_product_attention(q, wide_k, wide_v, is_causal=True)
        if run.index_rows is not None:
            scores, shortfall = self.scores(x, run.index_rows, cos, sin)
            run.index_losses.append(ops.index_loss(scores, run.index_rows, q, k, ratio) + shortfall)
        return ops.qsa_output(o, gate, self.o_proj.weight)


class Moe(nn.Module):
    """Top-k routed experts and one shared expert."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        E, width, H = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.top_k = config.num_experts_per_tok
        self.gate, self.experts, self.shared_expert = nn.Module(), nn.Module(), nn.Module()
        self.gate.weight = nn.Parameter(torch.empty(E, H))
        self.experts.gate_up_proj = nn.Parameter(torch.empty(E, 2 * width, H))
        self.experts.down_proj = nn.Parameter(torch.empty(E, H, width))
        for name, shape in (
            ("gate_proj", (H, config.shared_expert_intermediate_size)),
            ("up_proj", (H, config.shared_expert_intermediate_size)),
            ("down_proj", (config.shared_expert_intermediate_size, H)),
        ):
            setattr(self.shared_expert, name, nn.Linear(*shape, bias=False))
        self.shared_expert_gate = nn.Linear(H, 1, bias=False)

    def forward(self, x: Tensor, run: Run) -> Tensor:
        flat = x.flatten(0, 1)
        ids, weight, balance = ops.route(flat, self.gate.weight, self.top_k)
        run.balance_losses.append(balance)
        order, inverse, ends = ops.expert_order(ids, len(self.gate.weight))
        rows = ops.Dispatch.apply(flat, order, inverse)
        hidden = torch._grouped_mm(rows, self.experts.gate_up_proj.transpose(-1, -2), offs=ends)
        hidden = ops.swiglu_rows(hidden, ops.Dispatch.apply(weight.flatten()[:, None], order, inverse))
        y = torch._grouped_mm(hidden, self.experts.down_proj.transpose(-1, -2), offs=ends)
        y = ops.Combine.apply(y, order, inverse, self.top_k)
        shared = self.shared_expert
        return ops.shared_expert(
            flat,
            y,
            shared.gate_proj.weight,
            shared.up_proj.weight,
            shared.down_proj.weight,
            self.shared_expert_gate.weight,
        ).view_as(x)


class NgramEmbedding(nn.Module):
    """Hash constants and the table. The files hold the table in `split_ngram_parts` shards."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.c, primes = config, hash_primes(config)
        offsets = [sum(primes[:j]) for j in range(len(primes))]
        padding = -sum(primes) % config.make_ngram_vocab_size_divisible_by
        self.ngram_embedding = nn.Embedding(sum(primes) + padding, config.ple_embed_dim // len(primes))
        self.register_buffer("layer_multipliers", torch.tensor(hash_multipliers(config)))
        self.register_buffer("ngram_heads_vocab_sizes", torch.tensor(primes))
        self.register_buffer("ngram_heads_offsets", torch.tensor(offsets))

    def forward(self, tokens: Tensor) -> Tensor:
        ids = ops.ngram_ids(
            tokens,
            self.layer_multipliers,
            self.ngram_heads_vocab_sizes,
            self.ngram_heads_offsets,
            self.c.eos_token_id,
            self.c.heads_per_ngram,
        )
        return self.ngram_embedding(ids).flatten(-2)


class Ple(nn.Module):
    """Per-layer embedding: hashed n-gram features added to every stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.c, width = config, config.hc_count * config.hidden_size
        self.ple_embedding = NgramEmbedding(config)
        self.key_proj = nn.Linear(config.ple_embed_dim, width, bias=False)
        self.value_proj = nn.Linear(config.ple_embed_dim, config.hidden_size, bias=False)
        self.norm_key, self.norm_query, self.norm_conv = Norm(width), Norm(width), Norm(width)
        self.conv1d = nn.Conv1d(width, width, config.ple_conv_kernel_size, groups=width, bias=False)

    def forward(self, s: Tensor, tokens: Tensor) -> Tensor:
        return ops.ple_output(
            s,
            self.ple_embedding(tokens),
            self.key_proj.weight,
            self.value_proj.weight,
            self.norm_key.weight,
            self.norm_query.weight,
            self.norm_conv.weight,
            self.conv1d.weight.squeeze(1),
            self.c.ngram_size,
            self.c.rms_norm_eps,
        )


# ---------------------------------------------------------------- the model
@dataclass
class Run:
    """One forward pass: its settings, and the side losses that the layers leave in it."""

    rope: tuple[Tensor, Tensor]  # cos, sin [T, rotary_dim / 2] float32
    sparse: bool = False  # attend to the indexer's blocks only
    index_rows: Tensor | None = None  # query positions to distil the indexer on
    balance_losses: list[Tensor] = field(default_factory=list)
    index_losses: list[Tensor] = field(default_factory=list)


class Layer(nn.Module):
    """One decoder layer on streams whose last injection is still pending: (s, y, beta) -> (s, y, beta)."""

    def __init__(self, config: ModelConfig, kind: str, ple: bool):
        super().__init__()
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = QsaAttention(config)
        self.mlp = Moe(config)
        self.ple = Ple(config) if ple else None
        self.attn_hyper_connection = GatedResidual(config)
        self.mlp_hyper_connection = GatedResidual(config)

    def forward(self, s: Tensor, y: Tensor | None, beta: Tensor | None, tokens: Tensor | None, run: Run):
        if self.ple is not None:
            if y is not None:
                s, y, beta = s + beta.unsqueeze(-1) * y.unsqueeze(-2), None, None
            s = s + self.ple(s, tokens)
        s, x, beta = self.attn_hyper_connection(s, y, beta)
        y = self.linear_attn(x) if hasattr(self, "linear_attn") else self.self_attn(x, run)
        s, x, beta = self.mlp_hyper_connection(s, y, beta)
        return s, self.mlp(x, run), beta


class Trunk(nn.Module):
    """Embedding, decoder layers and the final mix (`model.` in the checkpoint)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.c = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, kind, i + 1 in config.ple_layer_ids) for i, kind in enumerate(config.layer_types)
        )
        self.hyper_connection_mixer = GatedResidual(config, inject=False)

    def forward(self, tokens: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        """tokens [B, T] -> streams [B, T, S, H] after the last layer, and the head's input [B, T, H]."""
        s = self.embed_tokens(tokens).unsqueeze(-2).repeat(1, 1, self.c.hc_count, 1)
        y = beta = None
        for layer in self.layers:
            s, y, beta = layer(s, y, beta, tokens, run)
        s, x, _ = self.hyper_connection_mixer(s, y, beta)
        return s, x


class Mtp(nn.Module):
    """The draft layer: row t takes the trunk's streams at t and token t + 1, and predicts token t + 2."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.c, H = config, config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(H), Norm(config.hc_count * H)
        self.fc_embedding, self.fc_hidden = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)
        self.layers = nn.ModuleList([Layer(config, "full_attention", ple=False)])
        self.hyper_connection_mixer = GatedResidual(config, inject=False)

    def forward(self, s: Tensor, embedding: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        """s [B, T, S, H], embedding of the next tokens [B, T, H] -> streams and head input, as the trunk's."""
        s = ops.draft_input(
            s,
            embedding,
            self.pre_fc_norm_embedding.weight,
            self.pre_fc_norm_hidden.weight,
            self.fc_embedding.weight,
            self.fc_hidden.weight,
            self.c.rms_norm_eps,
        )
        s, y, beta = self.layers[0](s, None, None, None, run)
        s, x, _ = self.hyper_connection_mixer(s, y, beta)
        return s, x


class DemoModel(nn.Module):
    """The whole checkpoint: `model`, `lm_head` and `mtp`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = Mtp(config)

    def run(self, T: int, sparse: bool = False, index_rows: Tensor | None = None) -> Run:
        """Settings of one pass over T tokens from position 0."""
        device, dims = self.lm_head.weight.device, self.config.rotary_dim
        frequency = self.config.rope_theta ** (-torch.arange(0, dims, 2, device=device, dtype=torch.float32) / dims)
        angle = torch.arange(T, device=device, dtype=torch.float32)[:, None] * frequency
        return Run((angle.cos(), angle.sin()), sparse, index_rows)

    def logits(self, tokens: Tensor, sparse: bool = True) -> tuple[Tensor, Tensor]:
        """tokens [B, T] of any length -> logits [B, T, V] in the compute type, and the streams [B, T, S, H]."""
        T = tokens.shape[1]
        padded = F.pad(tokens, (0, -T % ops.CHUNK), value=self.config.eos_token_id)
        s, x = self.model(padded, self.run(padded.shape[1], sparse))
        return self.lm_head(x[:, :T]), s[:, :T]

    def draft_logits(self, s: Tensor, next_tokens: Tensor, sparse: bool = True) -> tuple[Tensor, Tensor]:
        """Row t: logits for the token after `next_tokens[t]`, from the streams s[t]; and the draft layer's streams."""
        s, x = self.mtp(s, self.model.embed_tokens(next_tokens), self.run(s.shape[1], sparse))
        return self.lm_head(x), s
