"""``mlx-moe usage``: what is remembered of a model's experts, and forgetting it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_moe.cli import options

if TYPE_CHECKING:
    from mlx_moe.usage_store import UsageStore

TOP = 8
"""Experts that are listed per layer."""
_NOTHING = "Nothing is remembered of this model"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, look or delete, print; returns the exit status."""
    out = options.plain_parser("usage", "Show what is remembered of which experts a model uses.")
    out.add_argument("--model", help="pack, GGUF file, folder or Hub repository (default: the demonstration model)")
    out.add_argument("--reset", action="store_true", help="delete what was learned; a static profile stays")
    out.add_argument("--json", action="store_true", help="print JSON")
    args = out.parse_args(argv)
    from mlx_moe.runtime import model_folder

    store = store_of(model_folder(args.model))
    if args.reset:
        gone = [str(path) for path in store.reset()]
        print(json.dumps({"deleted": gone}) if args.json else "\n".join(f"Deleted {path}" for path in gone) or _NOTHING)
        return 0
    found = {kind: _found(store, kind) for kind in ("usage", "profile")} | {"by_token": _by_token(store)}
    print(json.dumps({"fingerprint": store.mark} | found, indent=2) if args.json else "\n".join(_lines(found)))
    return 0


def store_of(source: Path) -> UsageStore:
    """Where usage of a model is kept; its headers are read, no weights.

    Raises ValueError for a model folder whose experts cannot stream.
    """
    from mlx_moe.config import ModelConfig, read_config
    from mlx_moe.formats.gguf import open_gguf
    from mlx_moe.formats.gguf_model import expert_index, model_config
    from mlx_moe.formats.pack import is_pack, open_pack
    from mlx_moe.gguf_loading import is_gguf
    from mlx_moe.hf_index import NotInPlace, folder_index
    from mlx_moe.usage_store import UsageStore

    if is_gguf(source):
        file = open_gguf(source)
        config = ModelConfig.from_dict(model_config(file))
        return UsageStore.of(config, expert_index(file, config, range(config.num_hidden_layers)))
    if is_pack(source):
        pack = open_pack(source)
        return UsageStore.of(pack.config, pack.experts)
    config = ModelConfig.from_dict(read_config(source))
    try:
        return UsageStore.of(config, folder_index(source, config).experts)
    except NotInPlace as error:
        raise ValueError(f"{source}: its experts do not stream, so their use is not remembered: {error}") from None


def _found(store: UsageStore, kind: str) -> dict[str, Any] | None:
    """What a file holds; None without one that can be used."""
    usage = store.read(kind)
    if usage is None:
        return None
    layers = []
    for i, row in enumerate(usage.counts):
        best = sorted(range(row.size), key=lambda e, row=row: (-row[e], e))
        total = float(row.sum()) or 1.0
        quarter = float(sum(row[e] for e in best[: max(1, row.size // 4)])) / total
        top = [{"expert": e, "share": float(row[e]) / total} for e in best[:TOP] if row[e] > 0]
        layers.append({"layer": i, "top": top, "top_quarter_share": quarter, "in_memory": len(usage.order[i])})
    return {"file": str(store.find(kind)), "tokens": usage.tokens, "layers": layers}


def _by_token(store: UsageStore) -> dict[str, Any] | None:
    """The file of what is remembered by token, and of how many tokens it is."""
    memory = store.read_tokens()
    return None if memory is None else {"file": str(store.find("tokens")), "known": memory.known}


def _lines(found: dict[str, dict[str, Any] | None]) -> list[str]:
    out = []
    for kind, what in found.items():
        if what is None:
            continue
        if kind == "by_token":
            out.append(f"by token: {what['known']} of the vocabulary, {what['file']}")
            continue
        out += [f"{kind}: {what['tokens']} tokens, {what['file']}", "layer  top quarter  experts used most"]
        for layer in what["layers"]:
            top = " ".join(f"{e['expert']}:{e['share']:.1%}" for e in layer["top"])
            out.append(f"{layer['layer']:>5}  {layer['top_quarter_share']:>11.1%}  {top}")
    return out or [_NOTHING]
