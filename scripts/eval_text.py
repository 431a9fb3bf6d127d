"""Bits per byte of a model on text files, and how often its MTP layer guesses right; one JSON line last.

usage: python scripts/eval_text.py FILE... [--model DIR] [--bytes N] [--context 2048] [--stride 1536]

Documents in a file are separated by NUL bytes. Each is encoded, ended by the end-of-text token and predicted in windows
of ``context`` tokens that start ``stride`` tokens apart: a window counts the tokens that the one before it has not, so
every token counts once, its end-of-text token too. Bits per byte divide by the bytes of the text without the NULs.
``.xz`` files are unpacked; ``--bytes`` takes that much from the start, the last document cut.
MTP acceptance at position 1: how often the draft of token t + 2 is the trunk's own first choice there.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from mlx_moe import load
from mlx_moe.documents import read_documents


def windows(count: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, first counted) of windows over ``count`` inputs."""
    start = counted = 0
    while counted < count:
        stop = min(start + context, count)
        yield start, stop, counted
        counted = stop
        start += stride


def evaluate(model, ids: list[int], eos: int, context: int, stride: int) -> tuple[float, int, int]:
    """(nats, drafts right, drafts) over one document's ids; the first is predicted after the end-of-text token."""
    inputs, targets = [eos, *ids], [*ids, eos]
    nats, right, drafts = 0.0, 0, 0
    for start, stop, first in windows(len(inputs), context, stride):
        x = mx.array([inputs[start:stop]])
        logits, streams = model.forward(x)
        logits = logits[0].astype(mx.float32)
        picked = mx.take_along_axis(logits, mx.array(targets[start:stop])[:, None], axis=-1)[:, 0]
        loss = mx.logsumexp(logits, axis=-1) - picked
        nats += loss[first - start :].sum().item()
        if model.has_mtp and stop - start > 1:
            draft, _ = model.draft(streams[:, :-1], x[:, 1:], model.mtp.make_cache())
            same = draft[0].argmax(axis=-1) == logits[1:].argmax(axis=-1)
            same = same[max(first - start - 1, 0) :]
            right, drafts = right + same.sum().item(), drafts + same.size
    return nats, right, drafts


def evaluate_file(model, tokenizer, path: Path, args: argparse.Namespace) -> dict[str, float]:
    """Figures of one file."""
    nats, right, drafts, tokens, size = 0.0, 0, 0, 0, 0
    started = time.perf_counter()
    for text in read_documents(path, args.bytes):
        ids = tokenizer.encode(text, add_special_tokens=False)
        part = evaluate(model, ids, tokenizer.eos_token_id, args.context, args.stride)
        nats, right, drafts = nats + part[0], right + part[1], drafts + part[2]
        tokens, size = tokens + len(ids), size + len(text.encode())
    seconds = time.perf_counter() - started
    row = {"file": path.name, "bytes": size, "tokens": tokens, "bits_per_byte": round(nats / math.log(2) / size, 4)}
    row |= {"mtp_acceptance": round(right / max(drafts, 1), 4), "seconds": round(seconds, 1)}
    print(
        "{file}: {bits_per_byte:.3f} bits per byte, MTP {mtp_acceptance:.1%}, {bytes} bytes".format(**row), flush=True
    )
    return row


def main(argv: list[str] | None = None) -> None:
    """Evaluate every file; print a line each, the mean, and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", help="model folder (default: the demonstration model)")
    parser.add_argument("--bytes", type=int, help="of each file (default: all)")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--stride", type=int, default=1536)
    args = parser.parse_args(argv)
    if not 0 < args.stride <= args.context:
        parser.error(f"--stride is {args.stride}; allowed: 1 to --context = {args.context}")
    model, tokenizer = load(args.model)
    rows = [evaluate_file(model, tokenizer, path, args) for path in args.files]
    mean = sum(row["bits_per_byte"] for row in rows) / len(rows)
    print(f"mean: {mean:.3f} bits per byte")
    settings = {
        "context": args.context,
        "stride": args.stride,
        "device": str(mx.default_device()),
        "mlx": mx.__version__,
    }
    print(json.dumps({"eval": "text", **settings, "mean": round(mean, 4), "rows": rows}))


if __name__ == "__main__":
    main()
