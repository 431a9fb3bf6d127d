"""Carrying out a plan: into ``OUT/.partial``, file by file, and under the final names when all of it is there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx

from mlx_moe.conversion.plan import INDEX, Plan, PlannedFile
from mlx_moe.formats.checkpoint import write_json
from mlx_moe.formats.pack import StreamedFile
from mlx_moe.formats.pack.writer import sync_folder, temporary_names, write_synced

PARTIAL = ".partial"
_PLAN, _TOKENIZER = "plan.json", "tokenizer"
_OTHER_BYTES = 64 << 20  # tokenizer and JSON files
_CACHE_BYTES = 64 << 20

Progress = Callable[[int, str], None]
"""Called with the number of bytes that came to be since the last call, and the file's name."""


def run_plan(plan: Plan, out: str | Path, progress: Progress = lambda count, name: None) -> Path:
    """Write the pack, or go on with one that the same plan has begun.

    Raises:
        ValueError: the folder holds something else, or an unfinished conversion of another source or with other
            options.
        OSError: the disk has not enough room (checked before anything is written), or cannot be written.
    """
    out = Path(out).expanduser()
    _check_folder(plan, out)
    check_room(plan, out)
    partial = out / PARTIAL
    partial.mkdir(parents=True, exist_ok=True)
    with _alone(partial), _small_cache():
        write_synced(partial / _PLAN, json.dumps({"key": plan.key}))
        for file in plan.files:
            _make(file, out, progress)
        _publish(plan, out)
    return out


def check_room(plan: Plan, out: Path) -> None:
    """Raises OSError when the disk has less room than what is still to be written."""
    there = [out / PARTIAL / file.name for file in plan.files]
    done = sum(_size(path) + _size(temporary_names(path)[0]) for path in there)
    done += sum(_size(out / file.name) for file in plan.files)
    needed = plan.total_bytes + _OTHER_BYTES - done
    disk = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(disk).free
    if needed > free:
        sizes = f"{needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free"
        raise OSError(f"{out}: not enough room on the disk: {sizes}; choose smaller types or another disk")


def _check_folder(plan: Plan, out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file; name a new folder")
    entries = {path.name for path in out.iterdir()} if out.exists() else set()
    note = out / PARTIAL / _PLAN
    if not note.exists():
        begun = entries == {PARTIAL} and not any(path.suffix != ".new" for path in (out / PARTIAL).iterdir())
        if entries and not begun:
            raise ValueError(f"{out}: holds other files ({min(entries)}); name a new folder")
        return
    try:
        key = json.loads(note.read_text(encoding="utf-8")).get("key")
    except (ValueError, AttributeError):
        key = None
    if key != plan.key:
        what = "an unfinished conversion of another source, or with other options"
        raise ValueError(f"{out}: holds {what}; name a new folder, or delete this one")


@contextlib.contextmanager
def _alone(partial: Path) -> Iterator[None]:
    """Refuse a second process that writes the same pack."""
    with (partial / "lock.new").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{partial.parent}: another process is writing this pack; wait for it") from None
        yield


@contextlib.contextmanager
def _small_cache() -> Iterator[None]:
    """Freed arrays go back to the system, or memory would grow to whatever was used at one time."""
    before = mx.set_cache_limit(_CACHE_BYTES)
    try:
        yield
    finally:
        mx.set_cache_limit(before)
        mx.clear_cache()


def _make(file: PlannedFile, out: Path, progress: Progress) -> None:
    """One weight file, unless it is there."""
    target = out / PARTIAL / file.name
    if file.file_bytes in (_size(target), _size(out / file.name)):
        progress(file.data_bytes, file.name)
        return
    with StreamedFile(target, file.specs, file.metadata, file.cut) as stream:
        progress(stream.done, file.name)
        start = 0
        for job in file.jobs:
            if stream.done < start + job.nbytes:
                first = (stream.done - start) // job.unit_bytes if job.unit_bytes else 0
                for data in job.produce(first):
                    stream.append(data)
                    progress(data.nbytes, file.name)
            start += job.nbytes
        stream.finish()


def _publish(plan: Plan, out: Path) -> None:
    """Everything under its final name; config.json, without which the folder is no model, comes last."""
    partial = out / PARTIAL
    small = partial / _TOKENIZER
    shutil.rmtree(small, ignore_errors=True)
    small.mkdir()
    plan.source.save_tokenizer(small)
    write_json(small / INDEX, plan.index)
    write_json(small / "config.json", plan.config)
    others = sorted(path for path in small.iterdir() if path.name != "config.json")
    for path in [*(partial / file.name for file in plan.files), *others]:
        if path.exists():
            path.replace(out / path.name)
    sync_folder(out)
    (small / "config.json").replace(out / "config.json")
    sync_folder(out)
    shutil.rmtree(small)
    for path in sorted(partial.iterdir(), key=lambda path: path.name == _PLAN):  # the plan last: with it all can go on
        path.unlink()
    partial.rmdir()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
