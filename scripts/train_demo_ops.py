"""Array functions of the demonstration model's training graph: `train_demo_model` holds the weights and calls them.

Each is a pure function of tensors, differentiable, and small enough to compile on its own (`compile_units`), so that
all layers of one kind share one compilation. They know no module and no file.

Dimensions: B batch, T tokens, H hidden, S streams, N chunks, C chunk length, E experts, K experts per token,
Hk/Hv key/value heads of the delta rule, R = Hv / Hk, Dk/Dv their widths, V vocabulary. Activations come in the compute
type (bfloat16 in training); norms, gates, softmaxes and the delta rule are computed in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # delta-rule chunk: the triangular inverse costs C per token, the scan over chunks 1 / C
INVERSE_BASE = 8  # diagonal blocks inverted by a power series; larger ones would cancel badly in float32
INDEX_FLOOR = 0.5  # block scores below this are pushed up, away from exact zeros


# ---------------------------------------------------------------- small pieces
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in x's type."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / rms(x) * scale over the last axis, in float32; the caller passes 1 + w where the norm is of that kind."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] dims of x [B, T, heads, D], halves paired. cos, sin [T, dims / 2] float32."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], -1)


def causal_conv(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """Depthwise causal convolution: x [B, T, channels], weight [channels, taps], last tap on the present position."""
    T, taps = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, (taps - 1) * dilation, 0))
    return sum(padded[:, i * dilation : i * dilation + T] * weight[:, i].to(x.dtype) for i in range(taps))


# ---------------------------------------------------------------- gated residual
def connect(
    s: Tensor,
    y: Tensor | None,
    beta: Tensor | None,
    norm: Tensor,
    down: Tensor,
    up: Tensor,
    inject: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
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
    """State before each chunk: S_0 = 0, S_{n+1} = transition_n S_n + update_n; [N, n, Dk, Dk] and [N, n, Dk, Dv]."""

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


def to_chunks(t: Tensor) -> Tensor:
    """[B, T, ..heads, D] -> [N, B, ..heads, C, D]."""
    return t.unflatten(1, (-1, CHUNK)).movedim(1, 0).movedim(2, -2)


def gdn_chunks(
    x: Tensor,
    qkv_proj: Tensor,
    b_proj: Tensor,
    a_proj: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    key_heads: int,
    key_dim: int,
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All of the delta rule that does not need the state: x [B, T, H], T a multiple of CHUNK.

    Per chunk and value head, with cumulative log decay c: (I + A) [u | w] = [beta v | beta e^c k], where
    A_ij = beta_i e^(c_i - c_j) k_i.k_j below the diagonal. Then the output is P u + (e^c q - P w) S and the next state
    (e^(c_end) I - k'^T w) S + k'^T u, where P_ij = e^(c_i - c_j) q_i.k_j and k' = e^(c_end - c) k.
    Returns those four factors: [N, B, Hk, R, C, Dv], [.., C, Dk], [.., Dk, Dk], [.., Dk, Dv], float32."""
    value_heads = a_log.shape[0]
    qkv = F.silu(causal_conv(linear(x, qkv_proj), conv)).float()
    q, k, v = qkv.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], -1)
    q, k = (to_chunks(t.unflatten(-1, (key_heads, key_dim))) for t in (q, k))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q = q * key_dim**-0.5
    shape = (key_heads, value_heads // key_heads)
    v = to_chunks(v.unflatten(-1, (*shape, value_dim)))
    beta = to_chunks(torch.sigmoid(linear(x, b_proj).float()).unflatten(-1, (*shape, 1)))
    log_decay = -a_log.exp() * F.softplus(linear(x, a_proj).float() + dt_bias)
    c = to_chunks(log_decay.unflatten(-1, (*shape, 1))).cumsum(-2)  # [N, B, Hk, R, C, 1]
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
    return (
        read[..., :value_dim],
        q * grow - read[..., value_dim:],
        keep - write[..., value_dim:],
        write[..., :value_dim],
    )


def gdn_output(
    x: Tensor, intra: Tensor, query: Tensor, states: Tensor, z_proj: Tensor, norm: Tensor, out_proj: Tensor, eps: float
) -> Tensor:
    """Read the states, norm, gate, project: factors of `gdn_chunks` and states [N, B, Hk, R, Dk, Dv] -> [B, T, H]."""
    B, T, _ = x.shape
    o = (intra + query @ states).permute(1, 0, 4, 2, 3, 5).reshape(B, T, -1, intra.shape[-1])
    z = linear(x, z_proj).view(o.shape)
    o = rms_norm(o, norm, eps) * torch.sigmoid(z.float())
    return linear(o.to(x.dtype).flatten(-2), out_proj)


# ---------------------------------------------------------------- QSA attention
def qsa_project(
    x: Tensor,
    q_proj: Tensor,
    k_proj: Tensor,
    v_proj: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, heads, T, D], normed and roped, and the output gate [B, T, heads * D]."""
    heads = lambda t, width: t.unflatten(-1, (-1, width))  # noqa: E731
    q, gate = heads(linear(x, q_proj), 2 * head_dim).chunk(2, -1)
    k, v = heads(linear(x, k_proj), head_dim), heads(linear(x, v_proj), head_dim)
    q, k = rope(rms_norm(q, 1 + q_norm, eps), cos, sin), rope(rms_norm(k, 1 + k_norm, eps), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.flatten(-2)


def qsa_output(o: Tensor, gate: Tensor, o_proj: Tensor) -> Tensor:
    """o [B, heads, T, D], gated and projected -> [B, T, H]."""
    return linear(o.transpose(1, 2).flatten(-2) * torch.sigmoid(gate), o_proj)


def index_scores(
    x: Tensor,
    rows: Tensor,
    proj: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    ratio: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Block scores of the query positions `rows` [R]: x [B, T, H] -> [B, R, T // ratio] float32, incomplete ones -inf.

    Also the mean amount by which the best head of a complete block falls short of INDEX_FLOOR: blocks whose heads are
    all negative score exactly 0, and a tie at the cut-off lets two right implementations pick different blocks."""
    dim, blocks = q_norm.shape[0], x.shape[1] // ratio
    q = linear(x[:, rows], proj[: heads * dim]).unflatten(-1, (heads, dim))
    q = rope(rms_norm(q, 1 + q_norm, eps), cos[rows], sin[rows])
    k = linear(x[:, : blocks * ratio], proj[heads * dim :]).unflatten(1, (blocks, ratio)).float().mean(2).to(x.dtype)
    k = rope(rms_norm(k, 1 + k_norm, eps).unsqueeze(2), cos[: blocks * ratio : ratio], sin[: blocks * ratio : ratio])
    products = q.float().flatten(1, 2) @ k.float().squeeze(2).transpose(1, 2) * dim**-0.5
    products = products.view(*q.shape[:3], blocks)
    complete = torch.arange(blocks, device=x.device) < (rows[:, None] + 1) // ratio
    shortfall = (F.relu(INDEX_FLOOR - products.amax(2)) * complete).sum() / (complete.sum() * len(x)).clamp_min(1)
    return products.relu().sum(2).masked_fill(~complete, -torch.inf), shortfall


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
    T, D = q.shape[-2:]
    q = q.detach()[:, :, rows].unflatten(1, (k.shape[1], -1))
    logits = (q @ k.detach().transpose(-1, -2).unsqueeze(2)).float() * D**-0.5  # [B, kv heads, group, R, T]
    hidden = torch.arange(T, device=q.device) > rows[:, None]
    attention = logits.masked_fill(hidden, -torch.inf).softmax(-1).sum((1, 2))
    target = attention[..., : scores.shape[-1] * ratio].unflatten(-1, (-1, ratio)).sum(-1)
    complete = scores > -torch.inf
    target = target * complete
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    log_p = torch.where(complete, scores.log_softmax(-1), 0)
    return (target * (target.clamp_min(1e-9).log() - log_p)).sum(-1).mean()


# ---------------------------------------------------------------- mixture of experts
class Dispatch(torch.autograd.Function):
    """Copy rows to their places in expert order: x [n, ...], order [n * K] -> x[order // K]; `inverse` undoes it."""

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


# ---------------------------------------------------------------- PLE: hashed n-grams
def ngram_ids(tokens: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, eos: int, heads: int) -> Tensor:
    """Table rows [B, T, heads * orders] of token ids [B, T] int64; before an EOS or the start all reads as EOS."""
    history, cut = [tokens], torch.zeros_like(tokens, dtype=torch.bool)
    for back in range(1, len(multipliers)):
        shifted = F.pad(tokens, (back, 0), value=eos)[:, : tokens.shape[1]]
        shifted = torch.where(cut, eos, shifted)
        cut = cut | (shifted == eos)
        history.append(shifted)
    mixed, columns = history[0] * multipliers[0], []
    for i in range(1, len(multipliers)):
        mixed = mixed ^ (history[i] * multipliers[i])
        columns.append(mixed.unsqueeze(-1) % primes[(i - 1) * heads : i * heads])
    return torch.cat(columns, -1) + offsets


def ple_output(
    s: Tensor,
    e: Tensor,
    key_proj: Tensor,
    value_proj: Tensor,
    norm_key: Tensor,
    norm_query: Tensor,
    norm_conv: Tensor,
    conv: Tensor,
    dilation: int,
    eps: float,
) -> Tensor:
    """What PLE adds to the streams: s [B, T, S, H], n-gram embeddings e [B, T, ple_embed_dim] -> [B, T, S, H]."""
    S, H = s.shape[-2:]
    key = rms_norm(linear(e, key_proj).view(s.shape), 1 + norm_key.view(S, H), eps)
    query = rms_norm(s, 1 + norm_query.view(S, H), eps)
    gate = (key.float() * query.float()).sum(-1, keepdim=True) * H**-0.5
    gate = gate.sign() * gate.abs().clamp_min(1e-6).sqrt()
    v = torch.sigmoid(gate).to(s.dtype) * linear(e, value_proj).unsqueeze(-2)
    n = rms_norm(v, 1 + norm_conv.view(S, H), eps)
    return v + F.silu(causal_conv(n.flatten(-2), conv, dilation)).view(s.shape)


# ---------------------------------------------------------------- losses
def token_loss(x: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy in nats of x [B, T, H] against targets [B, T]; also the logits [B, T, V]."""
    logits = linear(x, head)
    wide = logits.float()
    picked = wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (wide.logsumexp(-1) - picked).mean(), logits


def draft_input(
    s: Tensor,
    embedding: Tensor,
    norm_embedding: Tensor,
    norm_hidden: Tensor,
    fc_embedding: Tensor,
    fc_hidden: Tensor,
    eps: float,
) -> Tensor:
    """The draft layer's streams [B, T, S, H]: s [B, T, S, H] of the trunk, embedding [B, T, H] of the next tokens.

    One rms over all S * H for the streams (the reading of mlx-vlm)."""
    e = rms_norm(embedding, 1 + norm_embedding, eps)
    h = rms_norm(s.flatten(-2), 1 + norm_hidden, eps).view_as(s)
    return linear(e, fc_embedding).unsqueeze(-2) + linear(h, fc_hidden)


def draft_loss(x: Tensor, head: Tensor, teacher: Tensor) -> Tensor:
    """Mean KL of the draft's distribution at row t from the trunk's at t + 1: x [B, T, H], teacher logits [B, T, V].

    The last row has no teacher and is left out."""
    student = linear(x[:, :-1], head).float()
    wide = teacher[:, 1:].float()
    log_p = wide - wide.logsumexp(-1, keepdim=True)
    log_q = student - student.logsumexp(-1, keepdim=True)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


# ---------------------------------------------------------------- compilation
COMPILED = (
    "connect",
    "gdn_chunks",
    "gdn_output",
    "qsa_project",
    "qsa_output",
    "index_scores",
    "block_mask",
    "index_loss",
    "route",
    "swiglu_rows",
    "shared_expert",
    "ngram_ids",
    "ple_output",
    "token_loss",
    "draft_input",
    "draft_loss",
)


def compile_units(backend: str = "inductor") -> None:
    """Replace the array functions of this module by compiled ones; layers of one kind share one compilation."""
    torch._dynamo.config.recompile_limit = 32  # variants: with and without a pending injection, frozen weights, T
    for name in COMPILED:
        globals()[name] = torch.compile(globals()[name], fullgraph=True, dynamic=False, backend=backend)
