"""gdn_step and gdn_commit as kernels, and their launches.

gdn_step: one threadgroup of 256 threads (8 simdgroups) per (row b, value head hv) takes all T tokens (1 to 8). The
head's state [Dv, Dk] stays in registers: simdgroup w holds rows w, w + 8, …, lane l columns l, l + 32, …. Per token:

1. all threads compute the convolution and silu of the head's q, k and v channels into threadgroup memory;
2. every simdgroup sums the squares of q and k for itself, so no barrier is needed between;
3. per row: decay, S k, delta, update, S q; the two dot products are lane sums in a fixed order;
4. outputs meet in threadgroup memory, every simdgroup sums their squares for itself, and the gated norm goes out.

Dk and Dv need not be multiples of anything; unused lanes hold zeros. Per token and head it reads and writes the state
once, 8 Dv Dk bytes, which is nearly all of the traffic. Two barriers per token. A token's arithmetic does not depend on
T. gdn_commit replays log rows with the same two operations on every element of the state, so it is bit-equal.

Differs from the reference in the order of the sums and the rounding of exp and log.
"""

from __future__ import annotations

import mlx.core as mx

from custom_kernels.gdn_step.reference import L2_EPS, Inputs, Spec, StepLog, Weights
from custom_kernels.portable import MAX_THREADS, Geometry, Launch, PortableKernel

MAX_TOKENS = 8

_HEADER = r"""
FN float sigmoid_(float x) { return 1.0f / (1.0f + exp(-x)); }
FN float softplus_(float x) { return x > 20.0f ? x : log(1.0f + exp(x)); }
// What a step and its replay do to one element of the state: decay, then the outer product.
FN float decayed_(float s, float decay) { return s * decay; }
FN float written_(float s, float k, float delta) { return fma(k, delta, s); }
"""

_STEP = r"""
  constexpr int COLS = (DK + 31) / 32;   // columns of the state per lane
  constexpr int ROWS = (DV + 7) / 8;     // rows of the state per simdgroup
  constexpr int CH = 2 * HK * DK + HV * DV;
  SHARED float qs[DK];
  SHARED float ks[DK];
  SHARED float vs[DV];
  SHARED float os[DV];
  const uint head = gid.y, row = gid.z;
  const uint key = TILED ? head % HK : head / (HV / HK);
  const size_t at = (size_t(row) * HV + head) * DV * DK;
  const float rate = exp(float(a_log[head]));
  const float bias = float(dt_bias[head]);
  float s[ROWS][COLS];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < COLS; ++c) {
      const int i = warp + 8 * r, j = lane + 32 * c;
      s[r][c] = i < DV && j < DK ? state[at + i * DK + j] : 0.0f;
    }
  for (int t = 0; t < TOKENS; ++t) {
    const size_t token = size_t(row) * TOKENS + t;
    for (int n = tid.x; n < 2 * DK + DV; n += 256) {
      const int channel = n < DK ? key * DK + n : n < 2 * DK ? HK * DK + key * DK + (n - DK)
                                                             : 2 * HK * DK + head * DV + (n - 2 * DK);
      float x = 0.0f;
      for (int i = 0; i < TAPS; ++i) {
        const int from = t + i - (TAPS - 1);
        const float input = from < 0 ? float(history[(size_t(row) * (TAPS - 1) + from + TAPS - 1) * CH + channel])
                                     : float(qkv[(size_t(row) * TOKENS + from) * CH + channel]);
        x += input * float(conv[channel * TAPS + i]);
      }
      x *= sigmoid_(x);
      if (n < DK) qs[n] = x;
      else if (n < 2 * DK) ks[n - DK] = x;
      else vs[n - 2 * DK] = x;
    }
    BARRIER();
    float q[COLS], k[COLS], q2 = 0.0f, k2 = 0.0f;
    for (int c = 0; c < COLS; ++c) {
      const int j = lane + 32 * c;
      q[c] = j < DK ? qs[j] : 0.0f;
      k[c] = j < DK ? ks[j] : 0.0f;
      q2 += q[c] * q[c];
      k2 += k[c] * k[c];
    }
    const float q_scale = 1.0f / sqrt(lane_sum(q2) + small[0]) / sqrt(float(DK));
    const float k_scale = 1.0f / sqrt(lane_sum(k2) + small[0]);
    for (int c = 0; c < COLS; ++c) {
      q[c] *= q_scale;
      k[c] *= k_scale;
      const int j = lane + 32 * c;
      if (warp == 0 && j < DK) log_k[(token * HV + head) * DK + j] = k[c];
    }
    const float g = -rate * softplus_(float(a[token * HV + head]) + bias);
    const float decay = exp(g);
    const float beta = sigmoid_(float(b[token * HV + head]));
    if (tid.x == 0) log_g[token * HV + head] = g;
    for (int r = 0; r < ROWS; ++r) {
      const int i = warp + 8 * r;
      float seen = 0.0f, o = 0.0f;
      for (int c = 0; c < COLS; ++c) {
        s[r][c] = decayed_(s[r][c], decay);
        seen += s[r][c] * k[c];
      }
      const float delta = beta * ((i < DV ? vs[i < DV ? i : 0] : 0.0f) - lane_sum(seen));
      for (int c = 0; c < COLS; ++c) {
        s[r][c] = written_(s[r][c], k[c], delta);
        o += s[r][c] * q[c];
      }
      o = lane_sum(o);
      if (lane == 0 && i < DV) {
        os[i] = o;
        log_d[(token * HV + head) * DV + i] = delta;
      }
    }
    BARRIER();
    float o2 = 0.0f;
    for (int j = lane; j < DV; j += 32) o2 += os[j] * os[j];
    const float o_scale = 1.0f / sqrt(lane_sum(o2) / float(DV) + small[1]);
    for (int n = tid.x; n < DV; n += 256) {
      const float gate = float(z[(token * HV + head) * DV + n]);
      const float open = SILU ? gate * sigmoid_(gate) : sigmoid_(gate);
      out[(token * HV + head) * DV + n] = T(os[n] * o_scale * float(norm[n]) * open);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < COLS; ++c) {
      const int i = warp + 8 * r, j = lane + 32 * c;
      if (i < DV && j < DK) last[at + i * DK + j] = s[r][c];
    }
"""

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
    small = mx.array([L2_EPS, spec.eps] + [0.0] * 6)
    return Launch(
        kernel=GDN_STEP,
        inputs=[inputs.qkv, inputs.z, inputs.a, inputs.b, inputs.history, inputs.state, *weights, small],
        template=list(template.items()),
        geometry=Geometry.of_groups((1, hv, B), MAX_THREADS),
        output_shapes=[inputs.z.shape, inputs.state.shape, (B, T, hv, dk), (B, T, hv, dv), (B, T, hv)],
        output_dtypes=[inputs.z.dtype, mx.float32, mx.float32, mx.float32, mx.float32],
    )


def gdn_commit_launch(state: mx.array, log: StepLog, keep: int) -> Launch:
    """The launch for ``naive_gdn_commit``'s arguments."""
    _, hv, dv, dk = state.shape
    template = {"SIZE": state.size, "TOKENS": log.g.shape[1], "HV": hv, "DV": dv, "DK": dk}
    return Launch(
        kernel=GDN_COMMIT,
        inputs=[state, *log, mx.full((8,), keep, dtype=mx.int32)],
        template=list(template.items()),
        geometry=Geometry.of_groups((-(-state.size // MAX_THREADS), 1, 1), MAX_THREADS),
        output_shapes=[state.shape],
        output_dtypes=[mx.float32],
    )
