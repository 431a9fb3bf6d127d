"""moce_route in one dispatch, and its launch.

One threadgroup of 256 threads routes all T tokens (1 to 8), one after the other:

1. every pair of lanes takes ``2 PER`` neighbouring experts and the best of them; the 128 bests are ranked by counting
   those that come before (a greater logit, or an equal one of a lower id) in threadgroup memory: no rounds, no ties
   left to chance. The true best ``MAXR`` experts all belong to the ``MAXR`` first pairs;
2. those pairs' experts are ranked in the same way, and the best ``MAXR`` go to a list by rank;
3. the same counting over the list, with the bonus, gives the choice;
4. sums of exponentials go lane by lane, then simdgroup by simdgroup, in fixed order;
5. the chosen look for themselves among those that earlier tokens named, and append what is missing.

Reads T * E logits and E words, writes a few hundred bytes; the time is the launch and a few hundred steps per token.
Differs from the reference in the rounding of exp and of the sum.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from custom_kernels.moce_route.reference import Policy, Routing
from custom_kernels.portable import MAX_THREADS, Geometry, Launch, PortableKernel

MAX_EXPERTS, MAX_TOP_K, MAX_RANK, MAX_TOKENS = 1024, 32, 64, 8

_HEADER = r"""
FN int ordered_(float x) {
  const int word = BITS(int, x + 0.0f);   // -0 becomes 0
  return word < 0 ? word ^ 0x7FFFFFFF : word;
}
"""

_BODY = r"""
  constexpr uint PER = (E + 255) / 256, LIST = 2 * PER * MAXR;
  constexpr int LEAST = -2147483647 - 1;
  SHARED int tops[128];         // best of every pair of lanes, as integers that sort like the logits, NaN included
  SHARED int order[LIST];       // the experts of the first MAXR pairs, by place of the pair: key, id, logit and word
  SHARED uint order_id[LIST];
  SHARED float order_logit[LIST];
  SHARED uint order_word[LIST];
  SHARED float best[MAXR];      // by true rank: logits, ids and words
  SHARED uint best_id[MAXR];
  SHARED uint best_word[MAXR];
  SHARED int adjusted[MAXR];
  SHARED uint chosen[K];
  SHARED uint fresh[K];         // bit 0: missing and not named before; bit 1: beyond the true top k
  SHARED float share[K];
  SHARED float partial[8];
  SHARED uint named[(E + 31) / 32];
  for (uint i = tid.x; i < (E + 31) / 32; i += 256) named[i] = 0;
  const float extra = bonus[0];
  uint word[PER], missing = 0, swapped = 0;
  for (uint i = 0; i < PER; ++i) word[i] = PER * tid.x + i < E ? words[PER * tid.x + i] : 0xFFFFFFFFu;
  for (uint t = 0; t < TOKENS; ++t) {
    float mine[PER];
    int key[PER], top = LEAST;
    for (uint i = 0; i < PER; ++i) {
      const uint e = PER * tid.x + i;
      mine[i] = e < E ? float(logits[t * E + e]) : 0.0f;
      key[i] = e < E ? ordered_(mine[i]) : LEAST;
      top = key[i] > top ? key[i] : top;
    }
    const int other = XOR(top, 1);
    top = other > top ? other : top;
    const uint pair = tid.x >> 1;
    if ((tid.x & 1) == 0) tops[pair] = top;
    BARRIER();
    uint place = 0;
    UNROLL_BY(16) for (uint o = 0; o < 128; ++o) place += uint(tops[o] > top) | (uint(tops[o] == top) & uint(o < pair));
    if (place < MAXR)
      for (uint i = 0; i < PER; ++i) {
        const uint at = (2 * place + (tid.x & 1)) * PER + i;
        order[at] = key[i];
        order_id[at] = PER * tid.x + i;
        order_logit[at] = mine[i];
        order_word[at] = word[i];
      }
    BARRIER();
    for (uint c = tid.x; c < LIST; c += 256) {
      const int own = order[c];
      const uint id = order_id[c];
      uint rank = 0;
      UNROLL_BY(16) for (uint o = 0; o < LIST; ++o)
        rank += uint(order[o] > own) | (uint(order[o] == own) & uint(order_id[o] < id));
      if (rank < MAXR) {
        best[rank] = order_logit[c];
        best_id[rank] = id;
        best_word[rank] = order_word[c];
        adjusted[rank] = ordered_(order_logit[c] + (order_word[c] != 0xFFFFFFFFu ? extra : 0.0f));
      }
    }
    BARRIER();
    const float highest = best[0];
    float sum = 0.0f;
    for (uint i = 0; i < PER; ++i)
      if (PER * tid.x + i < E) sum += exp(mine[i] - highest);
    sum = lane_sum(sum);
    if (lane == 0) partial[warp] = sum;
    if (tid.x < MAXR) {
      const int own = adjusted[tid.x];
      uint at = 0;
      UNROLL_BY(8) for (uint o = 0; o < MAXR; ++o) {
        const uint better = uint(adjusted[o] > own) | (uint(adjusted[o] == own) & uint(o < tid.x));
        at += o < KEEP ? uint(o < tid.x) : better & uint(tid.x >= KEEP);
      }
      if (at < K) {
        const uint id = best_id[tid.x];
        const bool absent = best_word[tid.x] == 0xFFFFFFFFu;
        chosen[at] = id;
        share[at] = exp(best[tid.x] - highest);
        fresh[at] = (absent && ((named[id >> 5] >> (id & 31)) & 1) == 0 ? 1 : 0) | (tid.x >= K ? 2 : 0);
        ids[t * K + at] = id;
        slots[t * K + at] = best_word[tid.x];
      }
    }
    BARRIER();
    if (warp == 0) {   // K is at most 32: one simdgroup has them all
      float total = 0.0f;
      for (uint w = 0; w < 8; ++w) total += partial[w];
      const float p = lane < K ? share[lane < K ? lane : 0] / total : 0.0f;
      const float norm = NORMALIZE ? lane_sum(p) : 1.0f;
      if (lane < K) {
        weights[t * K + lane] = p / norm;
        uint before = missing;
        for (uint j = 0; j < lane; ++j) before += fresh[j] & 1;
        if (fresh[lane] & 1) misses[before] = chosen[lane];
      }
    }
    for (uint j = 0; j < K; ++j) {
      missing += fresh[j] & 1;
      swapped += fresh[j] >> 1;
      if (TOKENS > 1 && tid.x == chosen[j] >> 5) named[tid.x] |= 1u << (chosen[j] & 31);
    }
    if (TOKENS > 1) BARRIER();
  }
  for (uint i = missing + tid.x; i < TOKENS * K; i += 256) misses[i] = 0xFFFFFFFFu;
  if (tid.x < 2) counts[tid.x] = tid.x == 0 ? missing : swapped;
"""

MOCE_ROUTE = PortableKernel(
    "moce_route", ["logits", "words", "bonus"], ["ids", "weights", "slots", "misses", "counts"], _BODY, _HEADER
)


def supports(tokens: int, experts: int, top_k: int, policy: Policy) -> bool:
    """Whether the kernel takes this size; the reference takes any."""
    return tokens <= MAX_TOKENS and 8 <= experts <= MAX_EXPERTS and top_k <= MAX_TOP_K and policy.max_rank <= MAX_RANK


def moce_route_launch(logits: mx.array, words: mx.array, top_k: int, policy: Policy, normalize: bool = True) -> Launch:
    """The launch for ``naive_moce_route``'s arguments; outputs are the fields of Routing, in order."""
    T, experts = logits.shape
    policy.check(top_k, experts)
    template = {
        "E": experts,
        "K": top_k,
        "TOKENS": T,
        "MAXR": min(policy.max_rank, experts),
        "KEEP": policy.keep_top,
        "NORMALIZE": int(normalize),
    }
    return Launch(
        kernel=MOCE_ROUTE,
        inputs=[logits, words, _bonus(policy.bonus)],
        template=list(template.items()),
        geometry=Geometry.of_groups((1, 1, 1), MAX_THREADS),
        output_shapes=[(T, top_k), (T, top_k), (T, top_k), (T * top_k,), (2,)],
        output_dtypes=[mx.uint32, mx.float32, mx.uint32, mx.uint32, mx.uint32],
    )


@lru_cache(maxsize=64)
def _bonus(value: float) -> mx.array:
    return mx.array([value] * 8, dtype=mx.float32)


def moce_route_kernel(backend: str, *args: object, **kwargs: object) -> Routing:
    """Run ``moce_route_launch(*args, **kwargs)`` on "metal" or "cuda"."""
    return Routing(*moce_route_launch(*args, **kwargs).run(backend))
