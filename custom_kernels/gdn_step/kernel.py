"""gdn_step and gdn_commit as kernels, and their launches.

gdn_step: one threadgroup of 256 threads (8 simdgroups) per (row b, value head hv) takes all T tokens (1 to 8). The
head's state [Dv, Dk] stays in registers: 8 lanes share a row, so a simdgroup holds 4 rows at a time and the threadgroup
32; lane l of the 8 holds columns 4 l to 4 l + 3, then those 32 further, … Steps:

1. all threads compute the convolution and silu of the head's q, k and v channels of all tokens into threadgroup memory;
2. per token, the 8 lanes of a row sum the squares of q and k for themselves, so no barrier is needed between;
3. per row: decay, S k, delta, update, S q; the two dot products are sums of 8 lanes in a fixed order;
4. outputs meet in threadgroup memory, every simdgroup sums their squares for itself, and the gated norm goes out.

Dk and Dv need not be multiples of anything; unused places hold zeros. Per token and head it reads and writes the state
once, 8 Dv Dk bytes, which is nearly all of the traffic. One barrier per token and one more. A token's arithmetic does
not depend on T. gdn_commit replays log rows with the same two operations on every element of the state, so it is
bit-equal.

Differs from the reference in the order of the sums and the rounding of exp and log.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from custom_kernels.gdn_step.reference import L2_EPS, Inputs, Spec, StepLog, Weights
from custom_kernels.portable import MAX_THREADS, Geometry, Launch, PortableKernel, aligned_or_not

MAX_TOKENS = 8

_HEADER = r"""
FN float sigmoid_(float x) { return 1.0f / (1.0f + exp(-x)); }
FN float softplus_(float x) { return x > 20.0f ? x : log(1.0f + exp(x)); }
FN float row_sum_(float v) {   // over the 8 lanes of a row
  v += XOR(v, 1);
  v += XOR(v, 2);
  return v + XOR(v, 4);
}
template <typename P> FN F4 first_(P p, int n) {   // p[0] to p[3], zeros from p[n] on
  F4 q;
  for (int i = 0; i < 4; ++i) q.v[i] = i < n ? float(p[i]) : 0.0f;
  return q;
}
// What a step and its replay do to one element of the state: decay, then the outer product.
FN float decayed_(float s, float decay) { return s * decay; }
FN float written_(float s, float k, float delta) { return fma(k, delta, s); }
"""

_STEP = (
    r"""
  constexpr int QUADS = (DK + 31) / 32;   // groups of 4 columns per lane
  constexpr int ROWS = (DV + 31) / 32;    // rows of the state per lane
  constexpr int CH = 2 * HK * DK + HV * DV, WIDTH = 2 * DK + DV;
  SHARED float xs[TOKENS * WIDTH];        // q, k and v of every token after convolution and silu
  SHARED float os[2 * DV];                // outputs of the present token and of the one before
  const uint head = gid.y, batch = gid.z;
  const uint key = TILED ? head % HK : head / (HV / HK);
  const int column = 4 * (lane & 7), top = 4 * warp + (lane >> 3);
  const size_t at = (size_t(batch) * HV + head) * DV * DK;
  float s[ROWS][QUADS][4];
"""
    + aligned_or_not(
        "state",
        r"""
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int c = 0; c < QUADS; ++c) {
      const int i = top + 32 * r, j = column + 32 * c;
      const int n = i < DV ? DK - j : 0;
      const F4 q = DK % 4 == 0 && n > 0 ? load4(state + at + i * DK + j) : first_(state + at + i * DK + j, n);
      UNROLL for (int e = 0; e < 4; ++e) s[r][c][e] = q.v[e];
    }
""",
    )
    + r"""  for (int m = tid.x; m < TOKENS * WIDTH; m += 256) {
    const int t = m / WIDTH, n = m % WIDTH;
    const int channel = n < DK ? key * DK + n : n < 2 * DK ? HK * DK + key * DK + (n - DK)
                                                           : 2 * HK * DK + head * DV + (n - 2 * DK);
    float x = 0.0f;
    for (int i = 0; i < TAPS; ++i) {
      const int from = t + i - (TAPS - 1);
      const float input = from < 0 ? float(history[(size_t(batch) * (TAPS - 1) + from + TAPS - 1) * CH + channel])
                                   : float(qkv[(size_t(batch) * TOKENS + from) * CH + channel]);
      x += input * float(conv[channel * TAPS + i]);
    }
    xs[m] = x * sigmoid_(x);
  }
  const float rate = exp(float(a_log[head]));
  const float bias = float(dt_bias[head]);
  BARRIER();
  for (int t = 0; t < TOKENS; ++t) {
    const size_t token = (size_t(batch) * TOKENS + t) * HV + head;
    const auto now = xs + t * WIDTH;
    float q[QUADS][4], k[QUADS][4], q2 = 0.0f, k2 = 0.0f;
    UNROLL for (int c = 0; c < QUADS; ++c)
      UNROLL for (int e = 0; e < 4; ++e) {
        const int j = column + 32 * c + e;
        q[c][e] = j < DK ? now[j] : 0.0f;
        k[c][e] = j < DK ? now[DK + j] : 0.0f;
        q2 = fma(q[c][e], q[c][e], q2);
        k2 = fma(k[c][e], k[c][e], k2);
      }
    const float q_scale = 1.0f / sqrt(row_sum_(q2) + small[0]) / sqrt(float(DK));
    const float k_scale = 1.0f / sqrt(row_sum_(k2) + small[0]);
    UNROLL for (int c = 0; c < QUADS; ++c)
      UNROLL for (int e = 0; e < 4; ++e) {
        q[c][e] *= q_scale;
        k[c][e] *= k_scale;
        const int j = column + 32 * c + e;
        if (tid.x < 8 && j < DK) log_k[token * DK + j] = k[c][e];
      }
    const float g = -rate * softplus_(float(a[token]) + bias);
    const float decay = exp(g);
    const float beta = sigmoid_(float(b[token]));
    if (tid.x == 0) log_g[token] = g;
    const auto outputs = os + (t & 1) * DV;
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const int i = top + 32 * r;
      float seen = 0.0f, o = 0.0f;
      UNROLL for (int c = 0; c < QUADS; ++c)
        UNROLL for (int e = 0; e < 4; ++e) {
          s[r][c][e] = decayed_(s[r][c][e], decay);
          seen = fma(s[r][c][e], k[c][e], seen);
        }
      const float delta = beta * ((i < DV ? now[2 * DK + (i < DV ? i : 0)] : 0.0f) - row_sum_(seen));
      UNROLL for (int c = 0; c < QUADS; ++c)
        UNROLL for (int e = 0; e < 4; ++e) {
          s[r][c][e] = written_(s[r][c][e], k[c][e], delta);
          o = fma(s[r][c][e], q[c][e], o);
        }
      o = row_sum_(o);
      if ((lane & 7) == 0 && i < DV) {
        outputs[i] = o;
        log_d[token * DV + i] = delta;
      }
    }
    BARRIER();
    float o2 = 0.0f;
    for (int j = lane; j < DV; j += 32) o2 = fma(outputs[j], outputs[j], o2);
    const float o_scale = 1.0f / sqrt(lane_sum(o2) / float(DV) + small[1]);
    for (int n = tid.x; n < DV; n += 256) {
      const float gate = float(z[token * DV + n]);
      const float open = SILU ? gate * sigmoid_(gate) : sigmoid_(gate);
      out[token * DV + n] = T(outputs[n] * o_scale * float(norm[n]) * open);
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int c = 0; c < QUADS; ++c) {
      const int i = top + 32 * r, j = column + 32 * c;
      if (DK % 4 == 0 && i < DV && j < DK)
        store4(last + at + i * DK + j, F4{{s[r][c][0], s[r][c][1], s[r][c][2], s[r][c][3]}});
      else
        UNROLL for (int e = 0; e < 4; ++e)
          if (i < DV && j + e < DK) last[at + i * DK + j + e] = s[r][c][e];
    }
"""
)

GDN_STEP = PortableKernel(
    "gdn_step",
    ["qkv", "z", "a", "b", "history", "state", "conv", "a_log", "dt_bias", "norm", "small"],
    ["out", "last", "log_k", "log_d", "log_g"],
    _STEP,
    _HEADER,
)

_COMMIT = r"""
  const uint n = gid.x;   // element of the state [B, HV, DV, DK]
  if (n < SIZE) {
    const uint j = n % DK, i = n / DK % DV, head = n / (DK * DV) % HV, row = n / (DK * DV * HV);
    float s = state[n];
    for (int t = 0; t < keep[0]; ++t) {
      const size_t token = (size_t(row) * TOKENS + t) * HV + head;
      s = decayed_(s, exp(log_g[token]));
      s = written_(s, log_k[token * DK + j], log_d[token * DV + i]);
    }
    last[n] = s;
  }
"""

GDN_COMMIT = PortableKernel("gdn_commit", ["state", "log_k", "log_d", "log_g", "keep"], ["last"], _COMMIT, _HEADER)


def gdn_step_launch(inputs: Inputs, weights: Weights, spec: Spec) -> Launch:
    """The launch for ``naive_gdn_step``'s arguments; outputs: out, state, then the fields of StepLog."""
    B, T, _ = inputs.qkv.shape
    if not 1 <= T <= MAX_TOKENS:
        raise ValueError(f"gdn_step takes 1 to {MAX_TOKENS} tokens, not {T}; use gdn_prefill")
    hk, hv, dk, dv = spec.key_heads, spec.value_heads, spec.dk, spec.dv
    template = {
        "T": inputs.z.dtype,
        "TOKENS": T,
        "HK": hk,
        "HV": hv,
        "DK": dk,
        "DV": dv,
        "TAPS": weights.conv.shape[1],
        "TILED": int(spec.tiled),
        "SILU": int(spec.gate == "silu"),
    }
    return Launch(
        kernel=GDN_STEP,
        inputs=[inputs.qkv, inputs.z, inputs.a, inputs.b, inputs.history, inputs.state, *weights, _small(spec.eps)],
        template=list(template.items()),
        geometry=Geometry.of_groups((1, hv, B), MAX_THREADS),
        output_shapes=[inputs.z.shape, inputs.state.shape, (B, T, hv, dk), (B, T, hv, dv), (B, T, hv)],
        output_dtypes=[inputs.z.dtype, mx.float32, mx.float32, mx.float32, mx.float32],
    )


@lru_cache
def _small(eps: float) -> mx.array:
    return mx.array([L2_EPS, eps] + [0.0] * 6)


@lru_cache
def _keep(tokens: int) -> mx.array:
    return mx.array([tokens] * 8, dtype=mx.int32)


def gdn_commit_launch(state: mx.array, log: StepLog, keep: int) -> Launch:
    """The launch for ``naive_gdn_commit``'s arguments."""
    _, hv, dv, dk = state.shape
    template = {"SIZE": state.size, "TOKENS": log.g.shape[1], "HV": hv, "DV": dv, "DK": dk}
    return Launch(
        kernel=GDN_COMMIT,
        inputs=[state, *log, _keep(keep)],
        template=list(template.items()),
        geometry=Geometry.of_groups((-(-state.size // MAX_THREADS), 1, 1), MAX_THREADS),
        output_shapes=[state.shape],
        output_dtypes=[mx.float32],
    )
