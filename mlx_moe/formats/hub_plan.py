"""Which files of a repository make one model.

Works on a listing alone, whose paths are plain (``is_plain``): no network, no disk. A repository may hold several
models (quantisations, or folders of different precision); each is a ``Variant``, and a plan has the files of one.
Nothing outside the lists below is ever part of a plan, so pickles, remote code and images are not fetched.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from mlx_moe.formats.checkpoint import INDEX

CONFIG = "config.json"
SIDE_FILES = frozenset({
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.json",
})  # fmt: skip
"""What the tokenizer and the sampling defaults are read from, with ``*.jinja`` and ``*.tiktoken``."""
_OWN = re.compile(r"(experts|ngram).*\.safetensors")  # parts of a pack, which its index does not name
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_MOST_SHARDS = 10_000  # a listing may name any number
_NO_MODEL = {"mmproj", "imatrix"}  # GGUF files of other things: image encoders, importance
_DRAFT_SHARE = 4  # a draft layer alone is at most this fraction of the smallest model beside it


class PlanError(ValueError):
    """A listing from which no model can be taken. The message is one line without the repository's name."""


class ChoiceError(PlanError):
    """Several models where one is needed; ``variants`` are those."""

    def __init__(self, variants: Sequence[Variant]):
        self.variants = tuple(variants)
        listed = ", ".join(f"{variant.name} ({human(variant.size)})" for variant in variants)
        super().__init__(f"holds {len(variants)} models: {listed}")


@dataclass(frozen=True, order=True)
class RepoFile:
    """A file by its path in the repository; ``blob`` is what the Hub's cache calls its contents, "" if unknown."""

    path: str
    size: int
    blob: str = ""

    @property
    def folder(self) -> str:
        """The folder in the repository, "" for its root."""
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        """The path's last part."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Variant:
    """One model of a repository.

    Attributes:
        kind: "safetensors" (with a config.json beside the weights) or "gguf".
        folder: of its files, "" for the root.
        name: to show.
        files: of weights, in order.
        missing: paths of weights that should be there, by their numbering or by the index.
        pattern: for --include, matching this model and no other of the repository.
    """

    kind: str
    folder: str
    name: str
    files: tuple[RepoFile, ...]
    missing: tuple[str, ...] = ()
    pattern: str = ""

    @property
    def size(self) -> int:
        """Bytes of its weights."""
        return sum(file.size for file in self.files)

    def beside(self, name: str) -> str:
        """The path of a file in its folder."""
        return f"{self.folder}/{name}" if self.folder else name


def human(size: int) -> str:
    """A number of bytes in the units that disks are sold in."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def is_plain(path: str) -> bool:
    """Whether a path stays in its repository and is not hidden."""
    parts = PurePosixPath(path).parts
    return bool(parts) and "\\" not in path and not any(part.startswith((".", "/")) for part in parts)


def variants(files: Iterable[RepoFile]) -> list[Variant]:
    """The models of a listing, by name; each with the pattern that chooses it."""
    files = list(files)
    models, _ = _gguf_models(files)
    found = sorted([*_folders(files), *models], key=lambda variant: (variant.folder, variant.name))
    return [replace(variant, pattern=_pattern(variant, found)) for variant in found]


def choose(found: Sequence[Variant], include: Sequence[str] = ()) -> Variant:
    """The model that the patterns match; without patterns the one in the root's safetensors, or the only one.

    Raises ChoiceError where several are left, PlanError where none is.
    """
    if not found:
        raise PlanError(f"holds neither .gguf files nor .safetensors beside a {CONFIG}, so there is nothing to run")
    left = [variant for variant in found if not include or _selected(variant, include)]
    if not left:
        patterns = " ".join(map(repr, include))
        raise PlanError(f"has no model file that matches {patterns}; try --include {found[0].pattern!r}")
    root = [variant for variant in left if variant.kind == "safetensors" and not variant.folder]
    if len(left) == 1 or (root and not include):
        return (root or left)[0]
    raise ChoiceError(left)


def with_index(variant: Variant, files: Iterable[RepoFile], index: str | None) -> Variant:
    """The variant with the weights that its index names, which is the text of the file or None."""
    if index is None:
        return variant
    try:
        names = sorted(set(json.loads(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError(f"{variant.beside(INDEX)} is not a weight index ({error!r})") from None
    if bad := [name for name in names if not _is_file_name(name)]:
        raise PlanError(f"{variant.beside(INDEX)} names {str(bad[0])[:80]!r}, which is not a file of its folder")
    there = {file.name: file for file in files if file.folder == variant.folder}
    own = [name for name in there if _OWN.fullmatch(name) and name not in names]
    weights = tuple(there[name] for name in sorted([*names, *own]) if name in there)
    missing = tuple(variant.beside(name) for name in names if name not in there)
    return replace(variant, files=weights, missing=missing)


def by_numbering(files: Iterable[RepoFile]) -> dict[str, list[RepoFile]]:
    """Files by what to call them: shards of one set go together, as NAME-*-of-00003.gguf."""
    out: dict[str, list[RepoFile]] = defaultdict(list)
    for file in files:
        stem, dot, suffix = file.path.rpartition(".")
        match = _SHARD.fullmatch(stem)
        out[f"{match[1]}-*-of-{match[3]}{dot}{suffix}" if match else file.path].append(file)
    return out


def side_files(variant: Variant, files: Iterable[RepoFile]) -> tuple[RepoFile, ...]:
    """The small files beside the weights that a loader reads."""
    own = {CONFIG, INDEX} if variant.kind == "safetensors" else set()
    templates = variant.beside("additional_chat_templates")

    def wanted(file: RepoFile) -> bool:
        if file.folder == templates:
            return file.name.endswith(".jinja")
        named = file.name in SIDE_FILES | own or file.name.endswith((".jinja", ".tiktoken"))
        return file.folder == variant.folder and named

    return tuple(sorted(file for file in files if wanted(file)))


def draft_file(variant: Variant, files: Iterable[RepoFile], include: Sequence[str] = ()) -> RepoFile | None:
    """The GGUF file with the multi-token-prediction layer alone, if the repository has one for this model.

    The one that a pattern matches, else the smallest of those beside the model.
    """
    if variant.kind != "gguf":
        return None
    _, drafts = _gguf_models(list(files))
    named = [file for file in drafts if _matches(file.path, include)]
    beside = [file for file in drafts if file.folder == variant.folder]
    return min(named or beside, key=lambda file: file.size, default=None)


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and "/" not in name and is_plain(name) and name.endswith(".safetensors")


def _folders(files: Sequence[RepoFile]) -> list[Variant]:
    """The folders that have a config.json and safetensors, or the index of some."""
    weights: dict[str, list[RepoFile]] = defaultdict(list)
    names: dict[str, set[str]] = defaultdict(set)
    for file in files:
        names[file.folder].add(file.name)
        if file.name.endswith(".safetensors"):
            weights[file.folder].append(file)
    return [
        Variant("safetensors", folder, folder or "safetensors", tuple(sorted(weights[folder])), _gaps(weights[folder]))
        for folder, there in names.items()
        if CONFIG in there and (weights[folder] or INDEX in there)
    ]


def _gguf_models(files: Sequence[RepoFile]) -> tuple[list[Variant], list[RepoFile]]:
    """The models in GGUF files, and the files that hold a draft layer alone."""
    families: dict[tuple[str, str, str], list[RepoFile]] = defaultdict(list)
    for file in files:
        stem = file.name.removesuffix(".gguf")
        if stem != file.name and not _words(stem) & _NO_MODEL:
            match = _SHARD.fullmatch(stem)
            families[(file.folder, match[1] if match else stem, match[3] if match else "")].append(file)
    found = [
        Variant("gguf", folder, stem, tuple(sorted(family)), _gaps(family))
        for (folder, stem, _), family in families.items()
    ]
    whole = [variant.size for variant in found if "mtp" not in _words(variant.name)]
    drafts = [v for v in found if whole and "mtp" in _words(v.name) and v.size * _DRAFT_SHARE <= min(whole)]
    return [v for v in found if v not in drafts], [file for variant in drafts for file in variant.files]


def _words(stem: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", stem.lower()))


def _gaps(files: Iterable[RepoFile]) -> tuple[str, ...]:
    """Paths that the numbering (NAME-00001-of-00003) of the others asks for."""
    paths = {file.path for file in files}
    wanted = set()
    for path in paths:
        stem, dot, suffix = path.rpartition(".")
        match = _SHARD.fullmatch(stem)
        if match and len(wanted) < _MOST_SHARDS:
            wanted |= {f"{match[1]}-{i:05d}-of-{match[3]}{dot}{suffix}" for i in range(1, int(match[3]) + 1)}
    return tuple(sorted(wanted - paths))


def _matches(path: str, patterns: Iterable[str]) -> bool:
    """As a shell matches, whatever the case; ``*`` crosses folders."""
    return any(fnmatchcase(path.lower(), pattern.lower()) for pattern in patterns)


def _selected(variant: Variant, include: Sequence[str]) -> bool:
    files = [file.path for file in variant.files] or [variant.beside(INDEX)]
    return any(_matches(path, include) for path in files)


def _pattern(variant: Variant, found: Sequence[Variant]) -> str:
    """Short where that is unique: what the name has that others do not; else the files themselves."""
    names = [other.name for other in found if other.kind == variant.kind]
    shared = os.path.commonprefix(names)  # noqa: RUF071  letter by letter, as wanted
    cut = max(shared.rfind(mark) for mark in "-./") + 1
    short = f"*{glob.escape(variant.name[cut:])}*"
    unique = variant.name[cut:] and [other for other in found if _selected(other, [short])] == [variant]
    return short if unique else exact_pattern(variant)


def exact_pattern(variant: Variant) -> str:
    """A pattern that matches the variant's weights and nothing else, whatever else the repository has."""
    if variant.kind == "safetensors" and variant.folder:
        return f"{glob.escape(variant.folder)}/*"
    first = variant.files[0].path if variant.files else variant.beside(INDEX)
    match = _SHARD.fullmatch(first.removesuffix(".gguf"))
    return f"{glob.escape(match[1])}-*-of-{match[3]}.gguf" if match else glob.escape(first)
