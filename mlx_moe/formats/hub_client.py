"""Everything that goes over the network, through huggingface_hub; and what its errors mean for the user."""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, HfFileSystem, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile as HubFile
from huggingface_hub.utils import tqdm

from mlx_moe.formats.hub_cache import is_commit
from mlx_moe.formats.hub_plan import RepoFile, is_plain

logger = logging.getLogger(__name__)

WORKERS = 4
"""Files at once. Whoever interrupts a download loses what these have of theirs, so not many."""
PAUSES_S = (2, 10, 30)
"""Before each further attempt when the connection breaks; files that are complete are not fetched again."""
_NETWORK = HfHubHTTPError.__bases__[0]
_ERRORS = (_NETWORK, OSError, RuntimeError, HFValidationError)
"""What huggingface_hub lets through: its own errors (OSErrors), the HTTP client's (whose base depends on the version),
and those of its Rust part."""


class HubError(FileNotFoundError):
    """A model that cannot be had from the Hub. The message is one line that names the repository and the remedy."""


class UnreachableError(HubError):
    """The Hub gave no answer; a copy in the cache may do."""


@contextlib.contextmanager
def explained(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turns what huggingface_hub raises into HubError."""
    try:
        yield
    except _ERRORS as error:
        if isinstance(error, HubError):
            raise
        kind, text = _meaning(error, revision)
        raise kind(f"{repo}: {text}") from None


def _meaning(error: Exception, revision: str | None) -> tuple[type[HubError], str]:
    reason, status, number = _reason(error), _status(error), getattr(error, "errno", None)
    login = "log in with 'hf auth login' or set HF_TOKEN"
    if isinstance(error, HFValidationError):
        return HubError, "no such folder, and not a Hub repository name (org/name)"
    if isinstance(error, GatedRepoError):
        return HubError, f"is gated; accept its terms on its page on the Hub, then {login}"
    if isinstance(error, RepositoryNotFoundError):
        return HubError, f"no such folder, and no such repository on the Hub; if it is private, {login}"
    if isinstance(error, RevisionNotFoundError):
        return HubError, f"has no revision {revision!r}; --revision takes a branch, a tag or a commit of it"
    if status in (401, 403):
        return HubError, f"the Hub refuses access ({status}); {login}"
    if isinstance(error, OfflineModeIsEnabled):
        return UnreachableError, "no such folder, and the Hub is switched off here; unset HF_HUB_OFFLINE to download it"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return HubError, f"the disk is full ({reason}); free some space and start again: complete files are kept"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return HubError, f"cannot be written ({reason}); set HF_HOME to a folder of yours, or use --dir"
    if reason.startswith("Consistency check failed"):
        return HubError, f"a file is not as long as the Hub announced it ({reason}); start again"
    return UnreachableError, f"the Hub has no answer ({reason}); check the connection and start again"


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def list_files(repo: str, revision: str | None) -> tuple[str, list[RepoFile]]:
    """The commit that a revision stands for now, and its files but the hidden ones."""
    api = HfApi()
    commit = api.model_info(repo, revision=revision).sha or ""
    if not is_commit(commit):
        raise HubError(f"{repo}: the Hub names {commit[:80]!r} as its commit; check HF_ENDPOINT")
    entries = api.list_repo_tree(repo, recursive=True, revision=commit)
    files = [entry for entry in entries if isinstance(entry, HubFile) and is_plain(entry.path)]
    return commit, [RepoFile(f.path, f.size, f.lfs.sha256 if f.lfs else f.blob_id) for f in files]


def read_start(repo: str, commit: str, path: str, size: int) -> bytes:
    """The first bytes of a file; the rest is not fetched."""
    system = HfFileSystem(skip_instance_cache=True)
    with system.open(f"{repo}@{commit}/{path}", "rb", block_size=0) as file:
        return file.read(size)


def fetch_small(repo: str, commit: str, paths: Sequence[str], folder: Path | None) -> None:
    """Fetch small files into the cache, or into ``folder``, without a progress bar."""
    for path in paths:
        hf_hub_download(repo, path, revision=commit, local_dir=folder, tqdm_class=_Silent)


def fetch(repo: str, revision: str | None, paths: Sequence[str], folder: Path | None) -> Path:
    """Fetch files, several at once, with progress on standard error; returns the snapshot's folder, or ``folder``.

    A connection that is cut goes on where it stopped; one that stays broken is tried again, file by file.
    """
    for pause in PAUSES_S:
        try:
            return _fetch_once(repo, revision, paths, folder)
        except _ERRORS as error:
            if not _is_transient(error):
                raise
            logger.warning("%s: the connection broke (%s); trying again in %d s", repo, _reason(error), pause)
            time.sleep(pause)
    return _fetch_once(repo, revision, paths, folder)


def _fetch_once(repo: str, revision: str | None, paths: Sequence[str], folder: Path | None) -> Path:
    patterns = [glob.escape(path) for path in paths]
    bars: list[tqdm] = []

    class Bar(tqdm):
        """Silent where nobody watches; kept, since huggingface_hub leaves its bars open, over what is printed next."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "disable": not sys.stderr.isatty() or kwargs.get("disable")})
            bars.append(self)

    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=patterns,
                local_dir=folder,
                max_workers=WORKERS,
                tqdm_class=Bar,
            )
        )
    finally:
        for bar in bars:
            bar.close()


def _is_transient(error: Exception) -> bool:
    """A broken connection or a server in trouble, as opposed to an answer, a full disk or an odd file."""
    status = _status(error)
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else error  # huggingface_hub wraps some so
    return status >= 500 if status else isinstance(cause, (_NETWORK, ConnectionError, TimeoutError))


class _Silent(tqdm):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "disable": True})
