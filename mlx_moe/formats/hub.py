"""From a path or a Hub repository to a local folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

# What the loader and the tokenizer read; nothing else is fetched.
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")


def resolve(
    path_or_repo: str | Path, revision: str | None = None, check: Callable[[Path], object] = lambda folder: None
) -> Path:
    """A local folder as it is, or a snapshot of the Hub repository ``org/name``.

    ``check`` is called with a repository's folder when it holds config.json and nothing else yet; it may raise.
    Raises FileNotFoundError, in one line, when the name is neither.
    """
    path = Path(path_or_repo)
    with contextlib.suppress(RuntimeError):  # ~name of nobody
        path = path.expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise FileNotFoundError(f"{path} is a file; give the model's folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(str(path_or_repo), revision=revision, allow_patterns=list(patterns)))

    try:
        check(fetch("config.json"))
        return fetch(*PATTERNS)
    except HFValidationError:
        raise FileNotFoundError(f"{path_or_repo}: no such folder, and not a Hub repository name (org/name)") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(f"{path_or_repo}: no such folder, and the Hub has no answer ({reason})") from None
