"""``load``: a model and its tokenizer, with mlx-lm's signature."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_moe.formats import gguf_tokenizer
from mlx_moe.formats.gguf import open_gguf
from mlx_moe.formats.tokenizer import has_tokenizer, load_tokenizer
from mlx_moe.gguf_loading import is_gguf
from mlx_moe.paging.plan import Wanted
from mlx_moe.paging.reader import THREADS
from mlx_moe.routing_settings import Moce
from mlx_moe.runtime import load_model, model_folder

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_moe.models.qwen4_exp import Model


REFUSED = {
    "adapter_path": "adapters are not supported",
    "trust_remote_code": "code from model repositories is never run",
}


def load(
    path_or_hf_repo: str | Path | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    *,
    dtype: mx.Dtype | None = None,
    norm_convention: str = "auto",
    mtp: str | Path | None = "auto",
    memory: str | int | None = None,
    expert_slots: int | None = None,
    resident: bool = False,
    io_threads: int = THREADS,
    read_ahead: bool = True,
    io: str | None = None,
    moce: Moce = None,
    prefill_step_size: int = Wanted.prefill_step_size,
    usage: bool = True,
    seed_residency: str | None = None,
    eviction: str | None = None,
    record_routing: str | Path | None = None,
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Model, TokenizerWrapper] | tuple[Model, TokenizerWrapper, dict[str, Any]]:
    """Load a model and its tokenizer.

    Args:
        path_or_hf_repo: a model folder, a GGUF file or a folder of one model's shards, or a Hub repository; None is the
            demonstration model of the package.
        tokenizer_config: keywords for transformers' AutoTokenizer.
        model_config: entries that override config.json.
        lazy: leave the weights to be read when they are first used, by the loading thread.
        return_config: also return the raw contents of config.json.
        revision: of the Hub repository.
        dtype, norm_convention, mtp, memory, expert_slots, resident, io_threads, read_ahead, io, moce,
            prefill_step_size, usage, seed_residency, eviction, record_routing: see ``load_model``.
        adapter_path, trust_remote_code: mlx-lm's, refused with the reason.

    Returns:
        (model, tokenizer) or (model, tokenizer, config); the tokenizer is mlx-lm's wrapper.

    Raises:
        ConfigError, FileFormatError, FileNotFoundError: each in one line that names the thing and the remedy.
    """
    for name, value in (("adapter_path", adapter_path), ("trust_remote_code", trust_remote_code)):
        if value:
            raise ValueError(f"{name} cannot be used: {REFUSED[name]}")
    source = model_folder(path_or_hf_repo, revision)
    model, config = load_model(
        source,
        dtype,
        model_config=model_config,
        lazy=lazy,
        norm_convention=norm_convention,
        mtp=mtp,
        memory=memory,
        expert_slots=expert_slots,
        resident=resident,
        io_threads=io_threads,
        read_ahead=read_ahead,
        io=io,
        moce=moce,
        prefill_step_size=prefill_step_size,
        usage=usage,
        seed_residency=seed_residency,
        eviction=eviction,
        record_routing=record_routing,
    )
    tokenizer = _tokenizer(source, config, tokenizer_config)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def _tokenizer(source: Path, config: Mapping[str, Any], options: Mapping[str, Any] | None) -> TokenizerWrapper:
    """The tokenizer in the folder; of a GGUF file without one beside it, the file's own."""
    folder = source if source.is_dir() else source.parent
    if is_gguf(source) and not has_tokenizer(folder):
        return gguf_tokenizer.load_tokenizer(open_gguf(source), options)
    return load_tokenizer(folder, config, options)
