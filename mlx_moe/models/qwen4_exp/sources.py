"""Where experts and n-gram rows come from: what the model asks, whoever answers.

The model does not know whether weights are resident or streamed. In windows only these two may wait on the device; in
prompts attention does too, so that its tiles do not all take memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import mlx.core as mx

Phase = Literal["decode", "prefill"]


class ExpertSource(Protocol):
    """Routed experts of every MoE layer. Layers count from 0; the MTP layer comes after the last."""

    @property
    def kernels(self) -> frozenset[tuple[str, str]]:
        """(op, variant) of the kernels that it runs."""

    def bind(self, routers: Sequence[mx.array]) -> None:
        """Called once at load with the router weights [E, H] of every MoE layer, for read-ahead."""

    def record(self, file: Any, routers: Sequence[mx.array], dtype: mx.Dtype) -> None:
        """Write what the routers say to a file from now on, until ``close`` (paging.trace).

        Args:
            file: a path; what is there is replaced.
            routers: as for ``bind``.
            dtype: that the model computes in.

        Raises OSError naming the file.
        """

    def begin(self, window_ids: mx.array) -> None:
        """A forward pass over token ids [B, T] starts; an earlier one that was not committed is kept whole."""

    def commit(self, accepted: int) -> None:
        """Of the last pass the first ``accepted`` tokens are kept; the rest was a rejected draft."""

    def abort(self) -> None:
        """The last pass ended with an error or an interrupt: nothing of it is kept, nothing is being read any more."""

    def resize(self, slots: int) -> None:
        """Keep another number of experts per layer in memory, between passes; raises ValueError where it cannot."""

    def relieve(self) -> None:
        """Between requests: give memory back where the system is short of it."""

    def statistics(self) -> Any:
        """Counters since the model was loaded (paging.statistics.ExpertStats); None where there is nothing to count."""

    def close(self) -> None:
        """End threads, close files, give memory back; no pass may follow."""

    def moe(self, layer: int, x: mx.array, logits: mx.array, shared: mx.array, phase: Phase = "decode") -> mx.array:
        """Route, run the experts, and add everything up.

        Args:
            layer: which MoE layer.
            x: [T, H], the block's input.
            logits: [T, E] float32, the router's output.
            shared: [T, H], the shared expert's output, worth queueing before a wait.
            phase: "decode" for windows of up to 8 tokens and batches of such, else "prefill".

        Returns:
            [T, H] in x's type: the chosen experts' outputs times their weights in rank order, then ``shared``, summed
            in float32.
        """


class RowSource(Protocol):
    """Rows of the n-gram tables."""

    @property
    def kernels(self) -> frozenset[tuple[str, str]]:
        """(op, variant) of the kernels that it runs."""

    def prepare(self, index: int, history: mx.array, count: int) -> None:
        """``rows`` with the same arguments follows later in this pass: reads may start now."""

    def rows(self, index: int, history: mx.array, count: int) -> mx.array:
        """Rows for the last ``count`` tokens of a history.

        Args:
            index: place among the PLE layers.
            history: [B, ngram_size - 1 + T] token ids, perhaps lazy; EOS stands before the start of the sequence.
            count: T.

        Returns:
            [B, T, ple_embed_dim]: per token the rows of all heads, joined.
        """

    def abort(self) -> None:
        """The pass ended with an error or an interrupt: ``rows`` will not follow."""

    def close(self) -> None:
        """End threads and close files; no pass may follow."""
