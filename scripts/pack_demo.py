"""Pack a trained checkpoint as the demonstration model of the package.

usage: python scripts/pack_demo.py HF_FOLDER [--out mlx_moe/demo] [--bits 4] [--group-size 64]

Quantises the large matrices with mx.quantize and writes config, weights, tokenizer and generation settings.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import mlx.core as mx

from mlx_moe import load_model, quantize_model, save_model

LIMIT_MB = 20
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def main(argv: list[str] | None = None) -> None:
    """Load in bfloat16, quantise, save, and say how large it became."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder with config.json, safetensors and tokenizer files")
    parser.add_argument("--out", type=Path, default=Path("mlx_moe/demo"))
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    args = parser.parse_args(argv)
    model, config = load_model(args.source, dtype=mx.bfloat16)
    quantize_model(model, bits=args.bits, group_size=args.group_size)
    save_model(args.out, model, config)
    for name in COPIED:
        shutil.copy(args.source / name, args.out / name)
    size = sum(path.stat().st_size for path in args.out.iterdir() if path.is_file()) / 1e6
    print(f"{args.out}: {size:.1f} MB")
    if size > LIMIT_MB:
        raise SystemExit(f"{args.out}: {size:.1f} MB is more than the {LIMIT_MB} MB that the package may carry")


if __name__ == "__main__":
    main()
