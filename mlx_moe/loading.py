"""``load``: a model and its tokenizer, with mlx-lm's signature."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_moe.formats import gguf_tokenizer
from mlx_moe.formats.gguf import open_gguf
from mlx_moe.formats.tokenizer import has_tokenizer, load_tokenizer
from mlx_moe.gguf_loading import is_gguf
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
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
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
        adapter_path, trust_remote_code: mlx-lm's, refused with the reason.
        options: dtype, memory, expert_slots and all else that ``load_model`` takes.

    Returns:
        (model, tokenizer) or (model, tokenizer, config); the tokenizer is mlx-lm's wrapper.

    Raises:
        ConfigError, FileFormatError, FileNotFoundError: each in one line that names the thing and the remedy.
    """
    for name, value in (("adapter_path", adapter_path), ("trust_remote_code", trust_remote_code)):
        if value:
            raise ValueError(f"{name} cannot be used: {REFUSED[name]}")
    source = model_folder(path_or_hf_repo, revision)
    model, config = load_model(source, model_config=model_config, lazy=lazy, **options)
    tokenizer = _tokenizer(source, config, tokenizer_config)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def _tokenizer(source: Path, config: Mapping[str, Any], options: Mapping[str, Any] | None) -> TokenizerWrapper:
    """The tokenizer in the folder; of a GGUF file without one beside it, the file's own."""
    folder = source if source.is_dir() else source.parent
    if is_gguf(source) and not has_tokenizer(folder):
        return gguf_tokenizer.load_tokenizer(open_gguf(source), options)
    return load_tokenizer(folder, config, options)
