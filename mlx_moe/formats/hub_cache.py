"""Where the files of a repository lie on this machine: the Hub's cache, or a folder of the user's choice.

Knows the documented layout of the cache (refs, snapshots, blobs) and no network.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from mlx_moe.formats.hub_plan import RepoFile, is_plain

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Place:
    """``folder`` has the files at their paths in the repository; ``blobs``, in the cache only, what they link to."""

    folder: Path
    blobs: Path | None = None

    def has(self, file: RepoFile) -> bool:
        """Whether the whole file is there."""
        path = self.folder / file.path
        return path.is_file() and path.stat().st_size == file.size

    def needed_bytes(self, files: Iterable[RepoFile]) -> int:
        """What is still to be fetched; contents that another revision has brought are not."""
        return sum(file.size for file in files if not self.has(file) and not self._blob_is_here(file))

    def _blob_is_here(self, file: RepoFile) -> bool:
        blob = self.blobs / file.blob if self.blobs and file.blob else None
        return blob is not None and blob.is_file() and blob.stat().st_size == file.size

    def discard(self, file: RepoFile) -> None:
        """Remove a file and what it links to in the cache, so that it is fetched again."""
        path = self.folder / file.path
        target = path.resolve()
        if self.blobs is not None and target.parent == self.blobs.resolve():
            target.unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Free space on the disk that the files go to."""
        there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        return shutil.disk_usage(there).free

    def unfinished_bytes(self) -> int:
        """What interrupted downloads have left in the cache."""
        return sum(path.stat().st_size for path in self.blobs.glob("*.incomplete")) if self.blobs else 0

    def files(self) -> list[RepoFile]:
        """What is there and not hidden, as a listing of the repository would name it."""
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        listed = (RepoFile(path.relative_to(self.folder).as_posix(), path.stat().st_size) for path in sorted(paths))
        return [file for file in listed if is_plain(file.path)]


def cache_place(repo: str, commit: str) -> Place:
    """Where the Hub's cache keeps one commit of a repository."""
    folder = _repo_folder(repo)
    return Place(folder / "snapshots" / commit, folder / "blobs")


def cached_place(repo: str, revision: str | None) -> Place | None:
    """The place of a branch, tag or commit as it was when it was last downloaded; None when it never was."""
    ref = _repo_folder(repo) / "refs" / (revision or constants.DEFAULT_REVISION)
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision or ""
    if not is_commit(commit):
        return None
    place = cache_place(repo, commit)
    return place if place.folder.is_dir() else None


def is_commit(text: str) -> bool:
    """Whether a text is the name of a commit, and so of a folder of the cache."""
    return _COMMIT.fullmatch(text) is not None


def cache_root() -> Path:
    """The folder of the Hub's cache."""
    return Path(constants.HF_HUB_CACHE).expanduser()


def _repo_folder(repo: str) -> Path:
    return cache_root() / f"models--{repo.replace('/', '--')}"
