"""``mlx-moe info``: what a model's files hold, what stays in memory and what streams, and what a token costs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mlx_moe.cli import options

if TYPE_CHECKING:
    from mlx_moe.description import Description

WIDTH = 80
"""Of what is printed, in columns."""
_NORMS = {"raw": "w - 1 is stored (raw)", "folded": "the factor is stored (folded)"}
_LAYERS_WIDTH = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, look, print; returns the exit status, 1 where the files cannot be used as they are."""
    out = options.plain_parser("info", "Say what a model's files hold and what they cost.")
    out.add_argument("path", help="pack, GGUF file or folder, or Hugging Face folder")
    out.add_argument("--json", action="store_true", help="the same as JSON, sizes in bytes")
    args = out.parse_args(argv)
    from mlx_moe.description import describe

    found = describe(args.path)
    print(json.dumps(found.to_json(), indent=2) if args.json else "\n".join(_lines(found)))
    return int(found.problem is not None)


def _lines(found: Description) -> list[str]:
    count, total = len(found.files), sum(path.stat().st_size for path in found.files)
    return [
        *_wrapped(str(found.path)),
        f"{found.kind}, {count} file{'s' * (count > 1)}, {size(total)}",
        "",
        *_model(found),
        "",
        *_experts(found),
        "",
        *_dense(found),
        "",
        *_costs(found),
        *_advice(found),
    ]


def size(count: float) -> str:
    """Bytes with three digits and a unit of 1000: 0.90 GB, 12.3 MB, 1.44 kB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor or (unit == "GB" and count >= 0.1e9):
            value = count / factor
            return (
                f"{value:.2f} {unit}"
                if value < 10
                else f"{value:.1f} {unit}"
                if value < 1000
                else f"{value:,.0f} {unit}"
            )
    return f"{count:.0f} B"


def _model(found: Description) -> list[str]:
    config = found.config
    sparse = config.num_hidden_layers - found.linear_layers
    draft = "with" if found.has_mtp else "without"
    heads = "tiled, as in GGUF files" if found.tiled else "grouped by key head"
    return [
        f"layers       {config.num_hidden_layers}: {found.linear_layers} Gated DeltaNet, {sparse} sparse attention; "
        f"{draft} draft layer",
        f"experts      {config.num_experts} per layer, {config.num_experts_per_tok} per token; "
        f"{config.hidden_size} to {config.moe_intermediate_size} and back",
        f"vocabulary   {config.vocab_size:,}; context {config.max_position_embeddings:,}",
        f"norms        {_NORMS[found.norm_convention]}",
        f"value heads  {heads}",
    ]


def _experts(found: Description) -> list[str]:
    out = [f"{'experts of layers':<{_LAYERS_WIDTH}}{'gate':<9}{'up':<9}{'down':<9}{'expert':>10}{'in all':>11}"]
    for numbers, layer, count in found.groups:
        total = size(count * found.config.num_experts * layer.record_bytes)
        types = f"{layer.gate:<9}{layer.up:<9}{layer.down:<9}"
        first, *rest = textwrap.wrap(numbers, _LAYERS_WIDTH - 2)
        out.append(f"{first:<{_LAYERS_WIDTH}}{types}{size(layer.record_bytes):>10}{total:>11}")
        out += rest
    return out


def _dense(found: Description) -> list[str]:
    kinds = (f"{kind} {size(count)}" for kind, count in found.dense_types.items())
    return _wrapped("dense types  " + ", ".join(kinds), indent=13)


def _costs(found: Description) -> list[str]:
    token, config = found.token_bytes, found.config
    layers = config.num_hidden_layers * config.num_experts_per_tok
    rows = [("in memory", "dense", found.dense_bytes, token["dense"], "")]
    where = "in memory" if found.in_memory else "streamed"
    rows.append((where, "experts", found.expert_bytes, token["experts"], f"{layers} experts, none cached"))
    if found.table:
        text = f"{config.ngram_heads} rows of {size(found.table.row_bytes)}, {found.table.format}"
        rows.append((where, "n-gram table", found.table.nbytes, token["rows"], text))
    head = f"{'':<11}{'':<14}{'size':>10}{'per token':>12}"
    return [head, *(f"{a:<11}{b:<14}{size(c):>10}{size(d):>12}  {e}".rstrip() for a, b, c, d, e in rows)]


def _advice(found: Description) -> list[str]:
    out: list[str] = []
    if found.table and found.kind == "pack" and found.table.place not in {str(path) for path in found.files}:
        out += ["", *_wrapped(f"The n-gram table stays in {found.table.place}")]
    if found.in_memory:
        out += ["", *_wrapped(found.in_memory)]
    if found.problem:
        out += ["", *_wrapped(f"warning: {found.problem}")]
    if found.converted:
        now, then = found.token_bytes["experts"], found.converted
        text = f"Experts of this type cost {size(now)} of reads per token where none is cached. A pack with gate and "
        text += f"up in {then['experts']} and down in {then['down']} costs {size(then['expert_token_bytes'])}, and "
        text += f"takes {size(then['total_bytes'])} of disk:"
        out += ["", *_wrapped(text), f"  mlx-moe convert --model {found.path} --out PACK"]
    return out


def _wrapped(text: str, indent: int = 0) -> Iterable[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
