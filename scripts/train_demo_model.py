"""The training graph of the demonstration model: Qwen3.8-Flash-Next (`qwen4_exp`) with its MTP layer, in PyTorch.

Owns the forward pass from token ids to losses. Knows nothing of data, optimizers, schedules or files.
It is written for whole sequences without a cache: the gated delta rule runs in chunks, experts run as one grouped
product over sorted tokens, and the QSA indexer scores all blocks at once. Attributes are named after the checkpoint's
keys, so `state_dict` needs no renaming except for the n-gram table (see `train_demo.checkpoint_tensors`).

Dimensions: B batch, T tokens, H hidden, S streams, N chunks, C chunk length, E experts, K experts per token,
Hk/Hv key/value heads of the delta rule, R = Hv / Hk, Dk/Dv their widths. The compute type is that of the embedding
matrix: bfloat16 in training, float32 for exact evaluation. Norms, gates, softmaxes and the delta rule are float32.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64  # delta-rule chunk: the triangular inverse costs C per token, the scan over chunks 1 / C
INVERSE_BASE = 8  # diagonal blocks inverted by a power series; larger ones would cancel badly in float32
INDEX_ROWS = 64  # query positions per sequence that the indexer is distilled on: plenty for 41,000 weights


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
        """"linear_attention" or "full_attention" (QSA) per layer."""
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
        rope = dict(rope_type="default", rope_theta=fields.pop("rope_theta"), mrope_interleaved=True,
                    partial_rotary_factor=fields.pop("partial_rotary_factor"), mrope_section=sections)
        return dict(architectures=["Qwen4ExpForCausalLM"], model_type="qwen4_exp_text", dtype="bfloat16",
                    **fields, layer_types=self.layer_types, rope_parameters=rope, norm_topk_prob=True,
                    hidden_act="silu", output_gate_type="sigmoid", attention_bias=False, attention_dropout=0.0,
                    tie_word_embeddings=False, bos_token_id=None, pad_token_id=None, use_cache=True,
                    initializer_range=0.02, router_aux_loss_coef=0.001, output_router_logits=False)


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


# ---------------------------------------------------------------- small pieces
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in x's type."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / rms(x) * scale over the last axis, computed in float32; the caller passes 1 + w where the norm is of that kind."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] dims of x [B, T, heads, D], halves paired. cos, sin [T, dims / 2] float32."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half:2 * half].float(), x[..., 2 * half:]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], -1)


def causal_conv(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """Depthwise causal convolution: x [B, T, channels], weight [channels, taps], the last tap on the present position."""
    T, taps = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, (taps - 1) * dilation, 0))
    return sum(padded[:, i * dilation:i * dilation + T] * weight[:, i].to(x.dtype) for i in range(taps))


# ---------------------------------------------------------------- gated residual
def connect(s: Tensor, y: Tensor | None, beta: Tensor | None, norm: Tensor, down: Tensor, up: Tensor,
            inject: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add a block's output to the streams, then mix them into the next block's input.

    s [B, T, S, H], y [B, T, H] and beta [B, T, S] of the block before (or None). Returns s, x [B, T, H] and the next
    beta (None without `inject`: the final mix)."""
    if y is not None:
        s = s + beta.unsqueeze(-1) * y.unsqueeze(-2)
    S, H = s.shape[-2:]
    n = rms_norm(s, 1 + norm.view(S, H), eps)
    flat = n.flatten(-2)
    low = F.silu(linear(flat, down) / S)
    mixed = (torch.sigmoid(linear(low, up)).view_as(n) * n).mean(-2)
    return s, mixed, None if inject is None else 2 * torch.sigmoid(linear(flat, inject) / S)


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
        return connect(s, y, beta, self.hc_norm.weight, self.input_mix_weight_down.weight,
                       self.input_mix_weight_up.weight, inject, self.eps)


class Norm(nn.Module):
    """The weight of a (1 + w) norm: zeros."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))


# ---------------------------------------------------------------- gated delta rule
def diagonal_blocks(a: Tensor, size: int, below: bool = False) -> Tensor:
    """Blocks of a [..., C, C] on the diagonal, [..., C / size, size, size]; `below`: (2i + 1, 2i), half as many."""
    tiles = a.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # [..., row block, row, column block, column]
    if below:
        return tiles[..., 1::2, :, ::2, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    return tiles.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 for strictly lower triangular a [..., C, C], float32, C = INVERSE_BASE * 2^j.

    Diagonal blocks by the nilpotent series (I - a)(I + a^2)(I + a^4), as sums of products so that no matrix unit
    rounds them; then neighbours are merged: the inverse of [[p, 0], [x, q]] is [[p', 0], [-q' x p', q']]."""
    d = diagonal_blocks(a, INVERSE_BASE)
    eye = torch.eye(INVERSE_BASE, dtype=a.dtype, device=a.device)
    product = lambda x, y: (x.unsqueeze(-1) * y.unsqueeze(-3)).sum(-2)  # noqa: E731
    d2 = product(d, d)
    inverse = product(product(eye - d, eye + d2), eye + product(d2, d2))
    while inverse.shape[-1] < a.shape[-1]:
        size = inverse.shape[-1]
        p, q = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        x = -(q @ diagonal_blocks(a, size, below=True)) @ p
        inverse = torch.cat([F.pad(p, (0, size)), torch.cat([x, q], -1)], -2)
    return inverse.squeeze(-3)


class UnitLowerInverse(torch.autograd.Function):
    """`unit_lower_inverse` with the closed derivative da = -strictly_lower(t^T dt t^T)."""

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        t = unit_lower_inverse(a)
        ctx.save_for_backward(t)
        return t

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        t = ctx.saved_tensors[0].transpose(-1, -2)
        return -(t @ grad @ t).tril(-1)


class ChunkScan(torch.autograd.Function):
    """State before each chunk: S_0 = 0, S_{n+1} = transition_n S_n + update_n. [N, batch, Dk, Dk], [N, batch, Dk, Dv]."""

    @staticmethod
    def forward(ctx, transition: Tensor, update: Tensor) -> Tensor:
        states = torch.zeros_like(update)
        for n in range(len(update) - 1):
            torch.baddbmm(update[n], transition[n], states[n], out=states[n + 1])
        ctx.save_for_backward(transition, states)
        return states

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        transition, states = ctx.saved_tensors
        total = torch.zeros_like(grad)  # total[n]: gradient of S_{n+1}, which is that of update_n
        back = transition.transpose(-1, -2)
        for n in range(len(grad) - 2, -1, -1):
            if n == len(grad) - 2:
                total[n] = grad[n + 1]
            else:
                torch.baddbmm(grad[n + 1], back[n + 1], total[n + 1], out=total[n])
        return total @ states.transpose(-1, -2), total


def gdn_chunks(x: Tensor, qkv_proj: Tensor, b_proj: Tensor, a_proj: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor,
               key_heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All of the delta rule that does not need the state: x [B, T, H], T a multiple of CHUNK.

    Per chunk and value head, with cumulative log decay c: (I + A) [u | w] = [beta v | beta e^c k], where
    A_ij = beta_i e^(c_i - c_j) k_i.k_j below the diagonal. Then the output is P u + (e^c q - P w) S and the next state
    (e^(c_end) I - k'^T w) S + k'^T u, where P_ij = e^(c_i - c_j) q_i.k_j and k' = e^(c_end - c) k.
    Returns those four factors: [N, B, Hk, R, C, Dv], [.., C, Dk], [.., Dk, Dk], [.., Dk, Dv], float32."""
    B, T, _ = x.shape
    value_heads = a_log.shape[0]
    qkv = F.silu(causal_conv(linear(x, qkv_proj), conv)).float()
    q, k, v = qkv.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], -1)
    chunks = lambda t, heads: t.reshape(B, T // CHUNK, CHUNK, *heads, -1).permute(1, 0, *range(3, 3 + len(heads)), 2, -1)  # noqa: E731
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (chunks(q, (key_heads,)), chunks(k, (key_heads,))))
    q = q * key_dim**-0.5
    shape = (key_heads, value_heads // key_heads)
    v = chunks(v, shape)
    beta = chunks(torch.sigmoid(linear(x, b_proj).float()), shape)
    c = chunks(-a_log.exp() * F.softplus(linear(x, a_proj).float() + dt_bias), shape).cumsum(-2)  # [.., C, 1]
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    decay = (c - c.transpose(-1, -2)).masked_fill(upper, -torch.inf).exp()
    scores = torch.cat([q, k], -2) @ k.transpose(-1, -2)  # [N, B, Hk, 2C, C]
    p = scores[..., None, :CHUNK, :] * decay
    t = UnitLowerInverse.apply((scores[..., None, CHUNK:, :] * decay * beta).tril(-1))
    q, k, grow = q.unsqueeze(3), k.unsqueeze(3), c.exp()
    uw = t @ torch.cat([v * beta, k * (beta * grow)], -1)
    read = p @ uw
    end = c[..., -1:, :]
    write = (k * (end - c).exp()).transpose(-1, -2) @ uw
    keep = end.exp() * torch.eye(key_dim, device=x.device)
    return (read[..., :value_dim], q * grow - read[..., value_dim:],
            keep - write[..., value_dim:], write[..., :value_dim])


def gdn_output(x: Tensor, intra: Tensor, query: Tensor, states: Tensor, z_proj: Tensor, norm: Tensor, out_proj: Tensor,
               eps: float) -> Tensor:
    """Read the states, norm, gate and project: the factors of `gdn_chunks` and states [N, B, Hk, R, Dk, Dv] -> [B, T, H]."""
    B, T, _ = x.shape
    o = (intra + query @ states).permute(1, 0, 4, 2, 3, 5).reshape(B, T, -1, intra.shape[-1])
    z = linear(x, z_proj).view(o.shape)
    o = rms_norm(o, norm, eps) * torch.sigmoid(z.float())
    return linear(o.to(x.dtype).flatten(-2), out_proj)


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
        self.conv1d = nn.Conv1d(2 * keys + values, 2 * keys + values, config.linear_conv_kernel_dim,
                                groups=2 * keys + values, bias=False)
        self.A_log = nn.Parameter(torch.zeros(config.linear_num_value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(config.linear_num_value_heads))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(config.linear_value_head_dim))
        self.out_proj = nn.Linear(values, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        c = self.c
        intra, query, transition, update = gdn_chunks(
            x, self.in_proj_qkv.weight, self.in_proj_b.weight, self.in_proj_a.weight, self.conv1d.weight.squeeze(1),
            self.A_log, self.dt_bias, c.linear_num_key_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        states = ChunkScan.apply(transition.flatten(1, 3), update.flatten(1, 3)).view_as(update)
        return gdn_output(x, intra, query, states, self.in_proj_z.weight, self.norm.weight, self.out_proj.weight,
                          c.rms_norm_eps)


# ---------------------------------------------------------------- QSA attention
def qsa_project(x: Tensor, q_proj: Tensor, k_proj: Tensor, v_proj: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor,
                sin: Tensor, head_dim: int, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, heads, T, D], normed and roped, and the output gate [B, T, heads * D]."""
    heads = lambda t, width: t.unflatten(-1, (-1, width))  # noqa: E731
    q, gate = heads(linear(x, q_proj), 2 * head_dim).chunk(2, -1)
    k, v = heads(linear(x, k_proj), head_dim), heads(linear(x, v_proj), head_dim)
    q, k = rope(rms_norm(q, 1 + q_norm, eps), cos, sin), rope(rms_norm(k, 1 + k_norm, eps), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.flatten(-2)


def qsa_output(o: Tensor, gate: Tensor, o_proj: Tensor) -> Tensor:
    """o [B, heads, T, D], gated and projected -> [B, T, H]."""
    return linear(o.transpose(1, 2).flatten(-2) * torch.sigmoid(gate), o_proj)


def index_scores(x: Tensor, rows: Tensor, proj: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor,
                 heads: int, ratio: int, eps: float) -> Tensor:
    """Block scores of the query positions `rows` [R]: x [B, T, H] -> [B, R, T // ratio] float32, -inf where not complete."""
    dim = q_norm.shape[0]
    blocks = x.shape[1] // ratio
    q = linear(x[:, rows], proj[:heads * dim]).unflatten(-1, (heads, dim))
    q = rope(rms_norm(q, 1 + q_norm, eps), cos[rows], sin[rows])
    k = linear(x[:, :blocks * ratio], proj[heads * dim:]).unflatten(1, (blocks, ratio)).float().mean(2).to(x.dtype)
    k = rope(rms_norm(k, 1 + k_norm, eps).unsqueeze(2), cos[:blocks * ratio:ratio], sin[:blocks * ratio:ratio])
    scores = q.float().flatten(1, 2) @ k.float().squeeze(2).transpose(1, 2)
    scores = scores.view(*q.shape[:3], blocks).relu().sum(2) * dim**-0.5
    incomplete = torch.arange(blocks, device=x.device) >= (rows[:, None] + 1) // ratio
    return scores.masked_fill(incomplete, -torch.inf)


def block_mask(scores: Tensor, budget_blocks: int, ratio: int, T: int) -> Tensor:
    """What each query may see: block scores of all T positions [B, T, T // ratio] -> bool [B, 1, T, T].

    The best `budget_blocks` complete blocks, and the incomplete tail up to the query itself."""
    position = torch.arange(T, device=scores.device)
    best = scores.topk(min(budget_blocks, scores.shape[-1]), -1)
    picked = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best.indices, best.values > -torch.inf)
    picked = F.pad(picked.repeat_interleave(ratio, -1), (0, T - picked.shape[-1] * ratio))
    tail = (position >= ((position[:, None] + 1) // ratio) * ratio) & (position <= position[:, None])
    return (picked | tail).unsqueeze(1)


def index_loss(scores: Tensor, rows: Tensor, q: Tensor, k: Tensor, ratio: int) -> Tensor:
    """Mean KL of the indexer's distribution over complete blocks from the dense attention's, summed over heads.

    scores [B, R, blocks] from `index_scores`; q [B, heads, T, D], k [B, kv heads, T, D] (both taken as constants)."""
    B, heads, T, D = q.shape
    q = q.detach()[:, :, rows].unflatten(1, (k.shape[1], -1))
    logits = (q @ k.detach().transpose(-1, -2).unsqueeze(2)).float() * D**-0.5  # [B, kv heads, group, R, T]
    hidden = torch.arange(T, device=q.device) > rows[:, None]
    attention = logits.masked_fill(hidden, -torch.inf).softmax(-1).sum((1, 2))
    target = attention[..., :scores.shape[-1] * ratio].unflatten(-1, (-1, ratio)).sum(-1)
    complete = scores > -torch.inf
    target = target * complete
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    log_p = torch.where(complete, scores.log_softmax(-1), 0)
    return (target * (target.clamp_min(1e-9).log() - log_p)).sum(-1).mean()


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

    def scores(self, x: Tensor, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, i = self.c, self.indexer
        return index_scores(x.detach(), rows, i.index_qk_proj.weight, i.q_layernorm.weight, i.k_layernorm.weight, cos, sin,
                            c.indexer_n_heads, c.indexer_compress_ratio, c.rms_norm_eps)

    def forward(self, x: Tensor, run: Run) -> Tensor:
        c, T, (cos, sin) = self.c, x.shape[1], run.rope
        ratio = c.indexer_compress_ratio
        q, k, v, gate = qsa_project(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight, self.q_norm.weight,
                                    self.k_norm.weight, cos, sin, c.head_dim, c.rms_norm_eps)
        group = c.num_attention_heads // c.num_key_value_heads
        wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if run.sparse:
            with torch.no_grad():
                scores = self.scores(x, torch.arange(T, device=x.device), cos, sin)
                mask = block_mask(scores, c.indexer_budget // ratio, ratio, T)
            o = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=mask)
        else:
            o = F.scaled_dot_product_attention(q, wide_k, wide_v, is_causal=True)
        if run.index_rows is not None:
            scores = self.scores(x, run.index_rows, cos, sin)
            run.index_losses.append(index_loss(scores, run.index_rows, q, k, ratio))
        return qsa_output(o, gate, self.o_proj.weight)


# ---------------------------------------------------------------- mixture of experts
class Dispatch(torch.autograd.Function):
    """Copy rows to their places in expert order: x [n, ...], order [n * K] -> x[order // K]. `inverse` undoes `order`."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse, ctx.copies = inverse, len(order) // len(x)
        return x[order // ctx.copies]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.inverse].unflatten(0, (-1, ctx.copies)).sum(1), None, None


class Combine(torch.autograd.Function):
    """The transpose of `Dispatch`: sum each token's K rows."""

    @staticmethod
    def forward(ctx, y: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.order, ctx.copies = order, copies
        return y[inverse].unflatten(0, (-1, copies)).sum(1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.order // ctx.copies], None, None, None


def route(x: Tensor, gate: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, H] -> expert ids [n, K], mixing weights [n, K] in x's type, and the load-balancing loss (1 when even)."""
    prob = F.linear(x.float(), gate.float()).softmax(-1)
    weight, ids = prob.topk(top_k, -1)
    used = torch.zeros_like(prob).scatter_(-1, ids, 1.0).mean(0)
    balance = (used * prob.mean(0)).sum() * (gate.shape[0] / top_k)
    return ids, (weight / weight.sum(-1, keepdim=True)).to(x.dtype), balance


def expert_order(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the assignments ids [n, K] by expert: order [n * K], its inverse, and each expert's end [E] int32."""
    flat = ids.flatten()
    order = flat.to(torch.uint8).argsort(stable=True) if experts < 256 else flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    ends.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return order, inverse, ends.cumsum(0, dtype=torch.int32)


def swiglu_rows(gate_up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up * mixing weight: [n, 2F], [n, 1] -> [n, F]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up * weight


def shared_expert(x: Tensor, y: Tensor, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor, gate: Tensor) -> Tensor:
    """y plus the gated shared expert of x, both [n, H]."""
    hidden = F.silu(linear(x, gate_proj)) * linear(x, up_proj)
    return y + torch.sigmoid(linear(x, gate)) * linear(hidden, down_proj)


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
        for name, shape in (("gate_proj", (H, config.shared_expert_intermediate_size)),
                            ("up_proj", (H, config.shared_expert_intermediate_size)),
                            ("down_proj", (config.shared_expert_intermediate_size, H))):
            setattr(self.shared_expert, name, nn.Linear(*shape, bias=False))
        self.shared_expert_gate = nn.Linear(H, 1, bias=False)

    def forward(self, x: Tensor, run: Run) -> Tensor:
        flat = x.flatten(0, 1)
        ids, weight, balance = route(flat, self.gate.weight, self.top_k)
        run.balance_losses.append(balance)
        order, inverse, ends = expert_order(ids, len(self.gate.weight))
        rows = Dispatch.apply(flat, order, inverse)
        hidden = torch._grouped_mm(rows, self.experts.gate_up_proj.transpose(-1, -2), offs=ends)
        hidden = swiglu_rows(hidden, Dispatch.apply(weight.flatten()[:, None], order, inverse))
        y = torch._grouped_mm(hidden, self.experts.down_proj.transpose(-1, -2), offs=ends)
        y = Combine.apply(y, order, inverse, self.top_k)
        shared = self.shared_expert
        return shared_expert(flat, y, shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight,
                             self.shared_expert_gate.weight).view_as(x)


# ---------------------------------------------------------------- PLE: hashed n-grams
def ngram_ids(tokens: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, eos: int, heads: int) -> Tensor:
    """Table rows [B, T, heads * orders] of token ids [B, T] int64; what lies before an EOS or the start reads as EOS."""
    history, cut = [tokens], torch.zeros_like(tokens, dtype=torch.bool)
    for back in range(1, len(multipliers)):
        shifted = F.pad(tokens, (back, 0), value=eos)[:, :tokens.shape[1]]
        shifted = torch.where(cut, eos, shifted)
        cut = cut | (shifted == eos)
        history.append(shifted)
    mixed, columns = history[0] * multipliers[0], []
    for i in range(1, len(multipliers)):
        mixed = mixed ^ (history[i] * multipliers[i])
        columns.append(mixed.unsqueeze(-1) % primes[(i - 1) * heads:i * heads])
    return torch.cat(columns, -1) + offsets


def ple_output(s: Tensor, e: Tensor, key_proj: Tensor, value_proj: Tensor, norm_key: Tensor, norm_query: Tensor,
               norm_conv: Tensor, conv: Tensor, dilation: int, eps: float) -> Tensor:
    """What PLE adds to the streams: s [B, T, S, H], n-gram embeddings e [B, T, ple_embed_dim] -> [B, T, S, H]."""
    S, H = s.shape[-2:]
    key = rms_norm(linear(e, key_proj).view(s.shape), 1 + norm_key.view(S, H), eps)
    query = rms_norm(s, 1 + norm_query.view(S, H), eps)
    gate = (key.float() * query.float()).sum(-1, keepdim=True) * H**-0.5
    gate = gate.sign() * gate.abs().clamp_min(1e-6).sqrt()
    v = torch.sigmoid(gate).to(s.dtype) * linear(e, value_proj).unsqueeze(-2)
    n = rms_norm(v, 1 + norm_conv.view(S, H), eps)
    return v + F.silu(causal_conv(n.flatten(-2), conv, dilation)).view(s.shape)


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
        ids = ngram_ids(tokens, self.layer_multipliers, self.ngram_heads_vocab_sizes, self.ngram_heads_offsets,
                        self.c.eos_token_id, self.c.heads_per_ngram)
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
        return ple_output(s, self.ple_embedding(tokens), self.key_proj.weight, self.value_proj.weight,
                          self.norm_key.weight, self.norm_query.weight, self.norm_conv.weight,
                          self.conv1d.weight.squeeze(1), self.c.ngram_size, self.c.rms_norm_eps)


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
        self.layers = nn.ModuleList(Layer(config, kind, i + 1 in config.ple_layer_ids)
                                    for i, kind in enumerate(config.layer_types))
        self.hyper_connection_mixer = GatedResidual(config, inject=False)

    def forward(self, tokens: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        """tokens [B, T] -> streams [B, T, S, H] after the last layer, and the head's input [B, T, H]."""
        s = self.embed_tokens(tokens).unsqueeze(-2).expand(-1, -1, self.c.hc_count, -1)
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
        """s [B, T, S, H], embedding of the next tokens [B, T, H] -> streams and head input, as the trunk's.

        One rms over all S * H for `pre_fc_norm_hidden` (the reading of mlx-vlm)."""
        eps = self.c.rms_norm_eps
        e = rms_norm(embedding, 1 + self.pre_fc_norm_embedding.weight, eps)
        h = rms_norm(s.flatten(-2), 1 + self.pre_fc_norm_hidden.weight, eps).view_as(s)
        s = linear(e, self.fc_embedding.weight).unsqueeze(-2) + linear(h, self.fc_hidden.weight)
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
        padded = F.pad(tokens, (0, -T % CHUNK), value=self.config.eos_token_id)
        s, x = self.model(padded, self.run(padded.shape[1], sparse))
        return self.lm_head(x[:, :T]), s[:, :T]

    def draft_logits(self, s: Tensor, next_tokens: Tensor, sparse: bool = True) -> tuple[Tensor, Tensor]:
        """Row t: logits for the token after `next_tokens[t]`, from the streams s[t]; and the draft layer's streams."""
        s, x = self.mtp(s, self.model.embed_tokens(next_tokens), self.run(s.shape[1], sparse))
        return self.lm_head(x), s


# ---------------------------------------------------------------- losses
def token_loss(x: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy in nats of x [B, T, H] against targets [B, T]; also the logits [B, T, V]."""
    logits = linear(x, head)
    wide = logits.float()
    picked = wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (wide.logsumexp(-1) - picked).mean(), logits


def draft_loss(x: Tensor, head: Tensor, teacher: Tensor) -> Tensor:
    """Mean KL of the draft's distribution at row t from the trunk's at row t + 1: x [B, T, H], teacher logits [B, T, V].

    The last row has no teacher and is left out."""
    student = linear(x[:, :-1], head).float()
    wide = teacher[:, 1:].float()
    log_p = wide - wide.logsumexp(-1, keepdim=True)
    log_q = student - student.logsumexp(-1, keepdim=True)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


COMPILED = ("connect", "gdn_chunks", "gdn_output", "qsa_project", "qsa_output", "index_scores", "block_mask", "index_loss",
            "route", "swiglu_rows", "shared_expert", "ngram_ids", "ple_output", "token_loss", "draft_loss")


def compile_units(backend: str = "inductor") -> None:
    """Replace the array functions of this module by compiled ones; layers of one kind share one compilation."""
    for name in COMPILED:
        globals()[name] = torch.compile(globals()[name], fullgraph=True, dynamic=False, backend=backend)
