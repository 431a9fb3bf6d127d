"""moce_route in one dispatch, and its launch.

One threadgroup of 256 threads routes all T tokens (1 to 8), one after the other:

1. every thread ranks its experts among all E by counting those that come before (a greater logit, or an equal one with
   a lower id): E * E / 256 comparisons in threadgroup memory, no rounds, no ties left to chance;
2. the best ``MAXR`` go to a list by rank; the same counting over the list, with the bonus, gives the choice;
3. the softmax denominator is summed lane by lane, then simdgroup by simdgroup, in fixed order;
4. thread 0 appends missing experts that no earlier token of the window has named.

Reads T * E logits and E words, writes a few hundred bytes; the time is the launch and about E * E / 64k cycles.
Differs from the reference in the rounding of exp and of the sum.
"""

from __future__ import annotations

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
  SHARED float logit[E];
  SHARED int order[E];          // logits as integers that sort alike, NaN included: every rank is taken once
  SHARED float best[MAXR];      // by true rank: logits, then ids
  SHARED uint best_id[MAXR];
  SHARED int adjusted[MAXR];
  SHARED uint chosen[K];
  SHARED float share[K];
  SHARED float partial[8];
  SHARED uint named[(E + 31) / 32];
  SHARED uint tally[2];
  for (uint i = tid.x; i < (E + 31) / 32; i += 256) named[i] = 0;
  if (tid.x < 2) tally[tid.x] = 0;
  for (uint t = 0; t < TOKENS; ++t) {
    BARRIER();
    for (uint e = tid.x; e < E; e += 256) {
      logit[e] = float(logits[t * E + e]);
      order[e] = ordered_(logit[e]);
    }
    BARRIER();
    for (uint e = tid.x; e < E; e += 256) {
      const int mine = order[e];
      uint rank = 0;
      for (uint o = 0; o < E; ++o) rank += (order[o] > mine || (order[o] == mine && o < e)) ? 1 : 0;
      if (rank < MAXR) {
        best[rank] = logit[e];
        best_id[rank] = e;
      }
    }
    BARRIER();
    if (tid.x < MAXR) {
      const bool resident = words[best_id[tid.x]] != 0xFFFFFFFFu;
      adjusted[tid.x] = ordered_(best[tid.x] + (resident ? bonus[0] : 0.0f));
    }
    BARRIER();
    if (tid.x < MAXR) {
      const int mine = adjusted[tid.x];
      uint place = 0;
      for (uint o = 0; o < MAXR; ++o) {
        const bool better = adjusted[o] > mine || (adjusted[o] == mine && o < tid.x);
        place += (o < KEEP ? o < tid.x : tid.x >= KEEP && better) ? 1 : 0;
      }
      if (place < K) {
        chosen[place] = best_id[tid.x];
        share[place] = best[tid.x];
      }
    }
    float sum = 0.0f;
    for (uint e = tid.x; e < E; e += 256) sum += exp(logit[e] - best[0]);
    sum = lane_sum(sum);
    if (lane == 0) partial[warp] = sum;
    BARRIER();
    float total = 0.0f;
    for (uint w = 0; w < 8; ++w) total += partial[w];
    if (tid.x < K) {
      float norm = 1.0f;
      if (NORMALIZE) {
        norm = 0.0f;
        for (uint j = 0; j < K; ++j) norm += exp(share[j] - best[0]) / total;
      }
      const uint id = chosen[tid.x];
      ids[t * K + tid.x] = id;
      weights[t * K + tid.x] = exp(share[tid.x] - best[0]) / total / norm;
      slots[t * K + tid.x] = words[id];
    }
    if (tid.x == 0) {
      for (uint j = 0; j < K; ++j) {
        const uint id = chosen[j];
        bool swapped = true;
        for (uint r = 0; r < K; ++r) swapped = swapped && best_id[r] != id;
        tally[1] += swapped ? 1 : 0;
        const uint bit = 1u << (id & 31);
        if (words[id] == 0xFFFFFFFFu && (named[id >> 5] & bit) == 0) {
          named[id >> 5] |= bit;
          misses[tally[0]] = id;
          tally[0] += 1;
        }
      }
    }
  }
  BARRIER();
  for (uint i = tally[0] + tid.x; i < TOKENS * K; i += 256) misses[i] = 0xFFFFFFFFu;
  if (tid.x < 2) counts[tid.x] = tally[tid.x];
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
    bonus = mx.full((8,), policy.bonus, dtype=mx.float32)
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
        inputs=[logits, words, bonus],
        template=list(template.items()),
        geometry=Geometry.of_groups((1, 1, 1), MAX_THREADS),
        output_shapes=[(T, top_k), (T, top_k), (T, top_k), (T * top_k,), (2,)],
        output_dtypes=[mx.uint32, mx.float32, mx.uint32, mx.uint32, mx.uint32],
    )


def moce_route_kernel(backend: str, *args: object, **kwargs: object) -> Routing:
    """Run ``moce_route_launch(*args, **kwargs)`` on "metal" or "cuda"."""
    return Routing(*moce_route_launch(*args, **kwargs).run(backend))
