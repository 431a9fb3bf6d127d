"""From a path or a Hub repository to a local model.

The order of a download: listing, choice of one model, its configuration (or the start of its GGUF file) checked, free
disk checked, small files, weights, sizes checked. So nothing large is fetched in vain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_moe.config import ConfigError
from mlx_moe.formats import hub_client as client
from mlx_moe.formats import hub_plan as planning
from mlx_moe.formats.checkpoint import INDEX
from mlx_moe.formats.hub_cache import Place, cache_place, cache_root, cached_place
from mlx_moe.formats.hub_client import HubError, UnreachableError
from mlx_moe.formats.hub_plan import ChoiceError, PlanError, RepoFile, Variant, human
from mlx_moe.formats.hub_start import START_BYTES, architecture
from mlx_moe.models.qwen4_exp.gguf_config import ARCHITECTURE

logger = logging.getLogger(__name__)

Check = Callable[[Path], object]
_LARGE_BYTES = 10**9


@dataclass(frozen=True)
class Request:
    """What is asked for: a repository, which model and revision of it, and where to; None is the Hub's cache."""

    repo: str
    include: tuple[str, ...] = ()
    revision: str | None = None
    folder: Path | None = None

    @property
    def command(self) -> str:
        """The command that fetches it, or what is missing of it."""
        options = [("--include", " ".join(map(shlex.quote, self.include))), ("--revision", self.revision)]
        options.append(("--dir", shlex.quote(str(self.folder)) if self.folder else None))
        return " ".join([f"mlx-moe download {self.repo}", *(f"{flag} {value}" for flag, value in options if value)])


@dataclass(frozen=True)
class Plan:
    """What a download fetches: ``files`` in order, of which ``needed_bytes`` are not at ``place`` yet."""

    request: Request
    commit: str
    variant: Variant
    files: tuple[RepoFile, ...]
    place: Place
    needed_bytes: int
    free_bytes: int


class NotHereError(HubError):
    """Nothing of a repository is on this machine."""


class AmbiguousError(HubError):
    """Several models and no choice among them; ``variants`` are those."""

    def __init__(self, message: str, variants: Sequence[Variant]):
        super().__init__(message)
        self.variants = tuple(variants)


def resolve(path_or_repo: str | Path, revision: str | None = None, check: Check = lambda folder: None) -> Path:
    """A local folder as it is, or a snapshot of the Hub repository ``org/name``: its folder, or its first GGUF file.

    Where the Hub gives no answer, or the repository holds several models, the one in the cache is taken. ``check`` is
    called with a repository's folder when it holds config.json and no weights yet; it may raise.
    Raises FileNotFoundError, in one line, when the name is neither.
    """
    path = Path(path_or_repo)
    with contextlib.suppress(RuntimeError):  # ~name of nobody
        path = path.expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise FileNotFoundError(f"{path} is a file; give a .gguf file or the model's folder")
    request = Request(str(path_or_repo), revision=revision)
    try:
        return download(request, check)
    except (UnreachableError, AmbiguousError) as error:
        try:
            found = local_copy(request)
        except NotHereError:
            raise error from None
        except HubError as local:
            if isinstance(error, AmbiguousError):
                raise
            raise HubError(f"{error}; {str(local).removeprefix(f'{request.repo}: ')}") from None
        logger.info("%s; taking %s", error, found)
        return found


def announce(plan: Plan) -> None:
    """One line on what a download will fetch; a warning, which is seen by default, where it is large."""
    text = (
        f"{plan.request.repo}: fetching {human(plan.needed_bytes)} of {len(plan.files)} files to {_where(plan.request)}"
    )
    level = logging.WARNING if plan.needed_bytes > _LARGE_BYTES else logging.INFO
    logger.log(level, "%s, where %s are free", text, human(plan.free_bytes))


def download(request: Request, check: Check = lambda folder: None, show: Callable[[Plan], object] = announce) -> Path:
    """Fetch one model of a repository, or what is missing of it; returns its folder, or its first GGUF file.

    Args:
        check: as in ``resolve``.
        show: called with the plan before anything large is fetched.

    Raises HubError, in one line, when there is no such model, it does not fit the disk, or it does not arrive whole;
    ConfigError when it cannot be run.
    """
    with client.explained(request.repo, request.revision):
        commit, files = client.list_files(request.repo, request.revision)
        place = Place(request.folder) if request.folder else cache_place(request.repo, commit)
        if request.folder is None:
            _discard_damaged(place, files)
        variant = _choose(request, files)
        variant = _checked(request, commit, place, variant, files, check)
        plan = _plan(request, commit, place, variant, files)
        show(plan)
        _check_space(plan)
        _fetch(plan)
    return _entry(place, variant)


def local_copy(request: Request) -> Path:
    """As ``download``, of what is on this machine alone. Raises HubError that names what is missing."""
    repo, place = request.repo, _local_place(request)
    files = place.files()
    found = [_indexed(request, place, variant, files) for variant in planning.variants(files)]
    if not found:
        raise NotHereError(f"{repo}: no weights in {place.folder} yet; fetch them with: {request.command}")
    whole = [variant for variant in found if not variant.missing]
    try:
        variant = planning.choose(found if request.include else whole or found, request.include)
    except ChoiceError as error:
        paths = ", ".join(str(_entry(place, variant)) for variant in error.variants)
        remedy = f"choose with --include, or give the path of one: {paths}"
        raise AmbiguousError(f"{repo}: {len(error.variants)} models are here; {remedy}", error.variants) from None
    except PlanError as error:
        raise HubError(f"{repo}: the copy here {error}; fetch more with: {request.command}") from None
    if variant.missing:
        count = f"{len(variant.missing)} of {len(variant.missing) + len(variant.files)} weight files"
        raise HubError(
            f"{repo}: {count} missing here, first {variant.missing[0]}; go on with: {_again(request, variant)}"
        )
    return _entry(place, variant)


def _again(request: Request, variant: Variant) -> str:
    """The command that fetches the rest of a variant."""
    if request.include or (variant.kind == "safetensors" and not variant.folder):
        return request.command
    return dataclasses.replace(request, include=(planning.exact_pattern(variant),)).command


def _local_place(request: Request) -> Place:
    place = Place(request.folder) if request.folder else cached_place(request.repo, request.revision)
    if place is None or not place.folder.is_dir():
        raise NotHereError(f"{request.repo}: is not in {_where(request)}; fetch it with: {request.command}")
    return place


def _where(request: Request) -> Path:
    return request.folder or cache_root()


def _discard_damaged(place: Place, files: Sequence[RepoFile]) -> None:
    """Remove what is not as long as the Hub says: huggingface_hub takes any file in its cache for whole."""
    for file in files:
        if (place.folder / file.path).exists() and not place.has(file):
            place.discard(file)


def _choose(request: Request, files: Sequence[RepoFile]) -> Variant:
    try:
        return planning.choose(planning.variants(files), request.include)
    except ChoiceError as error:
        command = dataclasses.replace(request, include=(error.variants[0].pattern,)).command
        raise AmbiguousError(f"{request.repo}: {error}; fetch one, as with: {command}", error.variants) from None
    except PlanError as error:
        raise HubError(f"{request.repo}: {error}") from None


def _indexed(request: Request, place: Place, variant: Variant, files: Sequence[RepoFile]) -> Variant:
    """The variant with the weights that the index names, if it has one and it is there."""
    path = place.folder / variant.beside(INDEX)
    if variant.kind != "safetensors" or not path.is_file():
        return variant
    try:
        return planning.with_index(variant, files, path.read_text(encoding="utf-8", errors="replace"))
    except PlanError as error:
        raise HubError(f"{request.repo}: {error}") from None


def _checked(
    request: Request, commit: str, place: Place, variant: Variant, files: Sequence[RepoFile], check: Check
) -> Variant:
    """The variant, once it is known that it can be run and that the repository has all of it."""
    if variant.kind == "gguf":
        _check_start(request, commit, place, variant.files[0])
    else:
        paths = {file.path for file in files} & {variant.beside(planning.CONFIG), variant.beside(INDEX)}
        client.fetch_small(request.repo, commit, sorted(paths), request.folder)
        try:
            check(place.folder / variant.folder)
        except ConfigError as error:
            raise ConfigError(f"{request.repo}: {error}") from None
        variant = _indexed(request, place, variant, files)
    if variant.missing:
        raise HubError(f"{request.repo}: the repository lacks {variant.missing[0]}; ask its owner, or choose another")
    return variant


def _check_start(request: Request, commit: str, place: Place, file: RepoFile) -> None:
    name = f"{request.repo}: {file.path}"
    if place.has(file):
        with (place.folder / file.path).open("rb") as here:
            start = here.read(START_BYTES)
    else:
        start = client.read_start(request.repo, commit, file.path, START_BYTES)
    found = architecture(name, start)
    if found not in (ARCHITECTURE, None):
        raise ConfigError(f"{name}: general.architecture is {found[:40]!r}; supported: {ARCHITECTURE}")


def _plan(request: Request, commit: str, place: Place, variant: Variant, files: Sequence[RepoFile]) -> Plan:
    draft = planning.draft_file(variant, files, request.include)
    wanted = (*planning.side_files(variant, files), *variant.files, *([draft] if draft else []))
    return Plan(request, commit, variant, wanted, place, place.needed_bytes(wanted), place.free_bytes())


def _check_space(plan: Plan) -> None:
    if plan.needed_bytes <= plan.free_bytes:
        return
    left = plan.place.unfinished_bytes()
    junk = f" ({human(left)} of interrupted downloads lie in {plan.place.blobs})" if left else ""
    sizes = f"{human(plan.needed_bytes)} to fetch, {human(plan.free_bytes)} free in {_where(plan.request)}{junk}"
    remedy = "free some, or name another disk with mlx-moe download --dir"
    raise HubError(f"{plan.request.repo}: {sizes}; {remedy}")


def _fetch(plan: Plan) -> None:
    """Small files first, so that an interrupted download lacks weights only; then everything is measured."""
    request, place = plan.request, plan.place
    known = request.folder is None and cached_place(request.repo, request.revision) == place
    if known and all(map(place.has, plan.files)):
        return
    small = [file.path for file in plan.files if file not in plan.variant.files and not file.path.endswith(".gguf")]
    client.fetch_small(request.repo, plan.commit, small, request.folder)
    got = client.fetch(request.repo, request.revision, [file.path for file in plan.files], request.folder)
    if request.folder is None and got != place.folder.resolve():
        raise HubError(f"{request.repo}: has changed during the download; start again")
    if damaged := [file for file in plan.files if not place.has(file)]:
        for file in damaged:
            place.discard(file)
        raise HubError(f"{request.repo}: {damaged[0].path} is not {damaged[0].size} bytes long, as listed; start again")


def _entry(place: Place, variant: Variant) -> Path:
    """What the loader is given."""
    return place.folder / (variant.files[0].path if variant.kind == "gguf" else variant.folder)
