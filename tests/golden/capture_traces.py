"""Make tests/golden/traces.npz: experts that the demonstration model chooses on three texts.

usage: python tests/golden/capture_traces.py TEXT CODE OTHER

For each file its first tokens; per name an array [layers, tokens, k], uint8, in order of rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_moe import load
from mlx_moe.paging import experts

NAMES, TOKENS = ("text", "code", "other"), 300


def main(argv: list[str] | None = None) -> None:
    """Write the file beside this one."""
    files = sys.argv[1:] if argv is None else argv
    model, tokenizer = load(dtype=mx.float32, resident=True)
    found: list[np.ndarray] = []
    route = experts.plain_route

    def recorded(*arguments):
        routed = route(*arguments)
        found.append(np.array(routed[0]).astype(np.uint8))
        return routed

    experts.plain_route = recorded  # prompts take it once per layer
    traces = {}
    for name, file in zip(NAMES, files, strict=True):
        found.clear()
        ids = tokenizer.encode(Path(file).read_text(encoding="utf-8"))[:TOKENS]
        mx.eval(model.streams(mx.array([ids])))
        traces[name] = np.stack(found)
    np.savez_compressed(Path(__file__).resolve().parent / "traces.npz", **traces)


if __name__ == "__main__":
    main()
