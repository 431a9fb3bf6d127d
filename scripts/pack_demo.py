"""Pack a trained checkpoint as the demonstration model of the package, of the types that packs of the real model have.

usage: python scripts/pack_demo.py HF_FOLDER --imatrix FILE [--out mlx_moe/demo] [--dense 4]

IQ2_XS for gate and up, Q2_0 for down, IQ4_NL for the n-gram table. Dense weights have 4 bits: the model was trained
with that rounding, and with 8 the pack would not fit. The files of an earlier model in the folder are replaced, its
data card stays.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from mlx_moe.conversion.choices import DENSE, Choices
from mlx_moe.conversion.imatrix import read_importances
from mlx_moe.conversion.plan import make_plan
from mlx_moe.conversion.run import run_plan
from mlx_moe.conversion.source import open_source

LIMIT_MB = 16


def main(argv: list[str] | None = None) -> None:
    """Convert beside the target, check the size, and take the old one's place."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder with config.json, safetensors and tokenizer files")
    parser.add_argument(
        "--imatrix", type=Path, required=True, help="from mlx-moe imatrix, on text that it was trained on"
    )
    parser.add_argument("--out", type=Path, default=Path("mlx_moe/demo"))
    parser.add_argument("--dense", choices=DENSE, default="4")
    args = parser.parse_args(argv)
    source = open_source(args.source)
    importances = read_importances(args.imatrix, tuple(layer.name for layer in source.layers), source.config)
    choices = Choices(experts="iq2_xs", down="q2_0", dense=args.dense, ngram="iq4_nl")
    with tempfile.TemporaryDirectory(dir=args.out.parent) as folder:
        pack = run_plan(make_plan(source, choices, importances), Path(folder) / "pack")
        size = sum(path.stat().st_size for path in pack.iterdir()) / 1e6
        print(f"{args.out}: {size:.1f} MB")
        if size > LIMIT_MB:
            raise SystemExit(f"{args.out}: {size:.1f} MB is more than the {LIMIT_MB} MB that the package may carry")
        args.out.mkdir(exist_ok=True)
        for path in args.out.iterdir():
            if path.suffix in (".safetensors", ".json"):
                path.unlink()
        for path in pack.iterdir():
            shutil.move(path, args.out / path.name)


if __name__ == "__main__":
    main()
