"""Measure the demonstration checkpoint on held-out text, as the 4-bit package will compute (or unrounded).

    python train_demo_eval.py --checkpoint run --text code=code.u16.npy:123456 prose=prose.u16.npy:123456

Each text is NAME=TOKENS.npy:BYTES, with the length of the text in bytes. Printed per text, last as one JSON line:
bits per byte with sparse attention (every token predicted from up to `--context` tokens before it, at least half of
that except at the start; the text follows one end-of-text token), the ratio of sparse to dense perplexity, and the
share of positions where the draft layer's first choice is the trunk's next choice. All in float32.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from train_demo_files import load_checkpoint
from train_demo_model import DemoModel


@dataclass(frozen=True)
class Text:
    """Held-out token ids and the length in bytes of what they encode."""

    name: str
    tokens: Tensor  # int64 [n]
    size_bytes: int

    @classmethod
    def parse(cls, argument: str) -> Text:
        name, _, rest = argument.partition("=")
        path, _, size = rest.rpartition(":")
        return cls(name, torch.from_numpy(np.load(path).astype(np.int64)), int(size))


@dataclass
class Totals:
    """Sums over scored positions."""

    tokens: int = 0
    sparse_nats: float = 0.0
    dense_nats: float = 0.0
    correct: int = 0
    drafts: int = 0
    accepted: int = 0


def windows(n: int, context: int) -> list[tuple[int, int, int]]:
    """(start, end, first scored position) covering n positions once, half a context apart."""
    if n <= context:
        return [(0, n, 0)]
    ends = [*range(context, n, context // 2), n]
    return [(end - context, end, 0 if i == 0 else ends[i - 1]) for i, end in enumerate(ends)]


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each position: [B, T, V], [B, T] -> [B, T]."""
    return logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def score(model: DemoModel, inputs: Tensor, targets: Tensor, scored: Tensor, totals: Totals, dense: bool) -> None:
    """Add the positions marked in `scored` to `totals`: inputs, targets and scored are [B, T]."""
    logits, streams = model.logits(inputs, sparse=True)
    choice = logits.argmax(-1)
    totals.tokens += int(scored.sum())
    totals.sparse_nats += nats(logits, targets)[scored].double().sum().item()
    totals.correct += int((choice == targets)[scored].sum())
    draft = model.draft_logits(streams, targets)[0].argmax(-1)
    agreed = (draft[:, :-1] == choice[:, 1:])[scored[:, 1:]]
    totals.drafts, totals.accepted = totals.drafts + len(agreed), totals.accepted + int(agreed.sum())
    if dense:
        totals.dense_nats += nats(model.logits(inputs, sparse=False)[0], targets)[scored].double().sum().item()


def evaluate(model: DemoModel, text: Text, context: int, batch: int, dense: bool = True) -> dict[str, float]:
    """All figures of one text."""
    device, eos = model.lm_head.weight.device, model.config.eos_token_id
    sequence = torch.cat([torch.tensor([eos]), text.tokens]).to(device)
    totals, spans = Totals(), windows(len(text.tokens), context)
    for at in range(0, len(spans), batch):
        rows = torch.tensor(spans[at : at + batch], device=device)  # [B, 3]: all windows of a text have one length
        places = rows[:, :1] + torch.arange(min(context, len(text.tokens)), device=device)
        score(model, sequence[places], sequence[places + 1], places >= rows[:, 2:], totals, dense)
    figures = dict(
        tokens=totals.tokens,
        bits_per_byte=totals.sparse_nats / math.log(2) / text.size_bytes,
        nats_per_token=totals.sparse_nats / totals.tokens,
        top1=totals.correct / totals.tokens,
        draft_acceptance=totals.accepted / totals.drafts,
    )
    if dense:
        figures["sparse_over_dense_perplexity"] = math.exp((totals.sparse_nats - totals.dense_nats) / totals.tokens)
    return {name: round(value, 5) for name, value in figures.items()}


def main(argv: list[str] | None = None) -> None:
    """Load, score each text, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder with config.json and model.safetensors")
    parser.add_argument("--text", type=Text.parse, nargs="+", required=True, help="NAME=TOKENS.npy:BYTES")
    parser.add_argument("--context", type=int, default=2048, help="tokens a prediction may see at most")
    parser.add_argument("--batch", type=int, default=1, help="windows at a time")
    parser.add_argument("--unrounded", action="store_true", help="the BF16 weights instead of their 4-bit rounding")
    parser.add_argument("--log", type=Path, help="a train_log.json to add the figures to")
    parser.add_argument("--no-dense", action="store_true", help="skip the dense-attention comparison")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args(argv)
    model = load_checkpoint(args.checkpoint, quantise=not args.unrounded).to(args.device).eval()
    result = {}
    for text in args.text:
        result[text.name] = evaluate(model, text, args.context, args.batch, not args.no_dense)
        print(text.name, json.dumps(result[text.name]), flush=True)
    mean = sum(figures["bits_per_byte"] for figures in result.values()) / len(result)
    summary = dict(weights="bf16" if args.unrounded else "4-bit", mean_bits_per_byte=round(mean, 5), **result)
    print(json.dumps(summary))
    if args.log:
        log = json.loads(args.log.read_text())
        log.setdefault("evaluation", []).append(summary)
        args.log.write_text(json.dumps(log, indent=0) + "\n")


if __name__ == "__main__":
    main()
