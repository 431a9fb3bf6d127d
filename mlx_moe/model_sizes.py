"""Sizes of a model for its memory plan, from files on this machine or from the headers of a Hub repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mlx_moe.description import Description, Experts, describe
from mlx_moe.formats.gguf import GgufFile, neighbours, read_header
from mlx_moe.formats.gguf_model import expert_index, has_draft
from mlx_moe.formats.hub import Request, local_copy
from mlx_moe.formats.hub_client import HubError
from mlx_moe.formats.hub_headers import header_copy
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.models.qwen4_exp.gguf_names import is_streamed, recipes
from mlx_moe.models.qwen4_exp.sanitize import is_norm
from mlx_moe.paging.sizes import ModelSizes

_NUMBER_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
"""Dense weights of these types become numbers in the type to compute in; others stay as they are."""
_FLOAT32 = ("linear_attn.norm.weight", "A_log", "dt_bias")
_EMBEDDING = "model.embed_tokens."


def model_sizes(
    request: Request, item_bytes: int = 2, mtp: str | Path | None = "auto"
) -> tuple[Description, ModelSizes]:
    """Look at a model.

    Args:
        request: ``repo`` is a pack, a folder, a GGUF file, or a Hub repository, of which a copy here is preferred.
        item_bytes: of a number that the model computes in.
        mtp: as for ``load_model``.

    Raises FileNotFoundError, FileFormatError or ConfigError, in one line.
    """
    with _located(request) as path:
        found = describe(path, headers_only=True)
        return found, _sizes(found, item_bytes, mtp)


def local_sizes(path: Path, item_bytes: int = 2, mtp: str | Path | None = "auto") -> ModelSizes:
    """Of a model that is on this machine; otherwise as ``model_sizes``."""
    return _sizes(describe(path, headers_only=True), item_bytes, mtp)


@contextmanager
def _located(request: Request) -> Iterator[Path]:
    """Where the model is, or its headers while the context lasts; messages call those by the repository's name."""
    path = Path(request.repo).expanduser()
    if path.exists() or path.suffix == ".gguf":
        yield path
        return
    try:
        here = local_copy(request)
    except HubError:
        here = None
    if here is not None:
        yield here
        return
    with header_copy(request) as copy:
        try:
            yield copy
        except ValueError as error:
            raise type(error)(re.sub(r"\S*mlx-moe-\d+-headers-[^/\s:]*", request.repo, str(error))) from None


def _sizes(found: Description, item_bytes: int, mtp: str | Path | None) -> ModelSizes:
    config = found.config
    dense = {name: _in_memory(name, kind, size, item_bytes) for name, (kind, size) in found.dense.items()}
    trunk = {name: size for name, size in dense.items() if not name.startswith("mtp.")}
    records = tuple(_record_bytes(layer) for layer in found.experts.values())[: config.num_hidden_layers]
    draft_bytes, draft_records = _draft(found, item_bytes, mtp)
    table = found.table
    sizes = ModelSizes(
        config=config,
        dense_bytes=sum(trunk.values()),
        dense_token_bytes=sum(size for name, size in trunk.items() if not name.startswith(_EMBEDDING)),
        mtp_bytes=draft_bytes,
        records=records + draft_records,
        row_bytes=config.ngram_heads * table.row_bytes if table else 0,
        table_bytes=table.nbytes if table else 0,
    )
    if found.kind == "MLX":
        return _resident(sizes, sizes.records, sizes.table_bytes)
    if found.kind != "Hugging Face":
        return sizes
    rows = table.rows if table else 0
    width = config.ple_embed_dim // config.ngram_heads if table else 0
    numbers = (3 * config.hidden_size * config.moe_intermediate_size * item_bytes,) * len(sizes.records)
    whole = _resident(sizes, numbers, rows * width * item_bytes)
    return whole if found.in_memory else replace(sizes, whole=whole)


def _resident(sizes: ModelSizes, records: tuple[int, ...], table_bytes: int) -> ModelSizes:
    """The same model with experts of these sizes and the n-gram table in memory, as arrays."""
    dense_bytes = sizes.dense_bytes + table_bytes
    return replace(sizes, dense_bytes=dense_bytes, records=records, row_bytes=0, table_bytes=0, streamed=False)


def _in_memory(name: str, kind: str, size: int, item_bytes: int) -> int:
    if kind not in _NUMBER_BYTES:
        return size
    wide = is_norm(name) or name.endswith(_FLOAT32)
    return size // _NUMBER_BYTES[kind] * (4 if wide else item_bytes)


def _record_bytes(layer: Experts) -> int:
    """Of one expert in memory."""
    return layer.slot_bytes or layer.record_bytes


def _draft(found: Description, item_bytes: int, mtp: str | Path | None) -> tuple[int, tuple[int, ...]]:
    """Dense bytes and record of the draft layer that would be loaded; 0 and nothing without one."""
    if mtp is None:
        return 0, ()
    if mtp == "auto" and found.has_mtp:
        own = {name: size for name, size in found.dense.items() if name.startswith("mtp.")}
        dense = sum(_in_memory(name, kind, size, item_bytes) for name, (kind, size) in own.items())
        return dense, (_record_bytes(list(found.experts.values())[-1]),)
    file = _beside(found) if mtp == "auto" else _named(Path(mtp).expanduser(), found)
    if file is None:
        return 0, ()
    dense = 0
    for weight, recipe in recipes(file.tensors, found.config).items():
        if weight.startswith("mtp.") and not is_streamed(weight):
            places = [file.place(source) for source in recipe.sources]
            share = 2 if recipe.step in ("left", "right") else 1
            size = sum(place.size for place in places) // share
            dense += _in_memory(weight, places[0].format.name, size, item_bytes)
    layer = expert_index(file, found.config, [found.config.num_hidden_layers]).layers[0]
    return dense, (layer.record_bytes,)


def _named(path: Path, found: Description) -> GgufFile:
    if found.kind != "GGUF":
        raise ValueError(f"mtp is {path}, but the draft layer of a model folder is the folder's own; leave it out")
    file = GgufFile([read_header(path)])
    if not has_draft(file, found.config):
        raise FileFormatError(f"{path}: holds no draft layer of this model; name another file")
    return file


def _beside(found: Description) -> GgufFile | None:
    """The one GGUF file beside the model that holds its draft layer alone."""
    if found.kind != "GGUF":
        return None
    files = [GgufFile([header]) for header in neighbours(found.files[0])]
    drafts = [f for f in files if has_draft(f, found.config) and not any(n.startswith("blk.0.") for n in f.tensors)]
    return drafts[0] if len(drafts) == 1 else None
