"""The headers of a repository's model as local files, so that it can be looked at without being downloaded.

Weight files are as long as the Hub lists them and hold their header alone; the rest is a hole that takes no room on the
disk. Configuration and index are fetched whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mlx_moe.formats import hub_client as client
from mlx_moe.formats import hub_plan as planning
from mlx_moe.formats.checkpoint import INDEX
from mlx_moe.formats.gguf import read_header
from mlx_moe.formats.hub import Request
from mlx_moe.formats.hub_client import HubError
from mlx_moe.formats.hub_plan import ChoiceError, PlanError, RepoFile, Variant
from mlx_moe.formats.safetensors import MAX_HEADER_BYTES, FileFormatError
from mlx_moe.scratch import scratch_folder

START_BYTES = 1 << 16
"""Read of every file at first; most headers end before."""
GGUF_BYTES = (START_BYTES, 1 << 20, 1 << 24, 1 << 28)
"""Read of a GGUF file until its header is whole; one with a vocabulary takes 11 MB."""
THREADS = 8


@contextlib.contextmanager
def header_copy(request: Request) -> Iterator[Path]:
    """The folder of a repository's model, or its first GGUF file, with headers only; gone after the context.

    Raises HubError or FileFormatError, in one line, when there is no such model.
    """
    with scratch_folder("headers") as folder:
        yield _fetch(request, folder)


def _fetch(request: Request, folder: Path) -> Path:
    with client.explained(request.repo, request.revision):
        commit, files = client.list_files(request.repo, request.revision)
        variant = _choose(request, files)
        if variant.kind == "safetensors":
            paths = {file.path for file in files} & {variant.beside(planning.CONFIG), variant.beside(INDEX)}
            client.fetch_small(request.repo, commit, sorted(paths), folder)
            variant = _indexed(request, variant, files, folder)
        if variant.missing:
            raise HubError(f"{request.repo}: the repository lacks {variant.missing[0]}; choose another model")
        draft = planning.draft_file(variant, files, request.include)
        wanted = [*variant.files, *([draft] if draft else [])]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda file: _write_header(request.repo, commit, file, folder / file.path), wanted))
    return folder / (variant.files[0].path if variant.kind == "gguf" else variant.folder)


def _choose(request: Request, files: Sequence[RepoFile]) -> Variant:
    try:
        return planning.choose(planning.variants(files), request.include)
    except ChoiceError as error:
        raise HubError(f"{request.repo}: {error}; choose one with --include {error.variants[0].pattern!r}") from None
    except PlanError as error:
        raise HubError(f"{request.repo}: {error}") from None


def _indexed(request: Request, variant: Variant, files: Sequence[RepoFile], folder: Path) -> Variant:
    path = folder / variant.beside(INDEX)
    try:
        return planning.with_index(variant, files, path.read_text(encoding="utf-8") if path.is_file() else None)
    except PlanError as error:
        raise HubError(f"{request.repo}: {error}") from None


def _write_header(repo: str, commit: str, file: RepoFile, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.path.endswith(".gguf"):
        _write_gguf(repo, commit, file, target)
        return
    start = client.read_start(repo, commit, file.path, min(START_BYTES, file.size))
    length = 8 + int.from_bytes(start[:8], "little")
    if len(start) < length <= min(MAX_HEADER_BYTES, file.size):
        start = client.read_start(repo, commit, file.path, length)
    _write(target, start, file.size)


def _write_gguf(repo: str, commit: str, file: RepoFile, target: Path) -> None:
    for size in GGUF_BYTES:
        _write(target, client.read_start(repo, commit, file.path, min(size, file.size)), file.size)
        try:
            tensors = read_header(target).tensors.values()
        except FileFormatError:  # zeros where the header goes on
            if size >= min(file.size, GGUF_BYTES[-1]):
                raise
            continue
        if min((place.offset for place in tensors), default=0) <= size:
            return


def _write(target: Path, start: bytes, size: int) -> None:
    target.write_bytes(start)
    os.truncate(target, size)
