"""Which kernels may be used on this machine: each is checked once, and the verdict is remembered.

A verdict holds for a device, a version of MLX and a kernel's text, so another chip, a new MLX or an edited kernel is
checked again. A kernel that failed falls back to its reference. Without a GPU nothing is checked and nothing written.

Owns the verdict file, ``verdicts.json`` in the user's cache folder. What is in it is not trusted: a file that is not of
this format counts as none. Must not know: models, weights.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from custom_kernels import dispatch
from custom_kernels.checks import FELLOWS, Check, Verdict, check, kernel_hash, one_line, run_check, time_reference
from mlx_moe.environment import cache_folder
from mlx_moe.formats.checkpoint import write_json
from mlx_moe.platform import device

logger = logging.getLogger(__name__)

FORMAT = "mlx_moe verdicts 1"
MAX_BYTES = 4 << 20
"""A larger file is not ours."""
MAX_VERDICTS = 2000
"""In the file; the oldest go first."""

_NOT_OURS = (OSError, ValueError, RecursionError)  # what reading a file of any content may raise


@dataclass(frozen=True)
class Finding:
    """What is known of one kernel, and what its op runs on: a back end, and why that."""

    op: str
    variant: str
    backend: dispatch.Backend
    reason: str
    verdict: Verdict

    @property
    def name(self) -> str:
        """Op and variant."""
        return f"{self.op} {self.variant}".rstrip()


def require_kernels(kernels: Iterable[tuple[str, str]]) -> None:
    """Check those (op, variant) that have no verdict here; those that failed, now or earlier, fall back with a warning.

    Raises ValueError for an op or variant that has no kernel.
    """
    choice = dispatch.device_choice()
    if choice.backend == "reference":
        return
    known, new, verdicts = read_verdicts(), {}, {}
    for op, variant in sorted(kernels):
        one = check(op, variant)
        key = _key(one, choice.backend)
        if key not in known:
            logger.info("checking kernel %s on this device", f"{op} {variant}".rstrip())
            known[key] = new[key] = run_check(one, choice.backend)
        verdicts[op, variant] = known[key]
    if new:
        remember(new)
    for finding in _findings(verdicts, choice):
        if finding.backend == "reference":
            dispatch.disable(finding.op, f"{finding.reason}; 'mlx-moe doctor' checks again", finding.variant)


def examine(
    kernels: Iterable[tuple[str, str]], calls: int = 16, progress: Callable[[str], None] = lambda name: None
) -> list[Finding]:
    """Check (op, variant) anew whatever is remembered, and remember each verdict at once: compiling can take minutes.

    Without a GPU the references are timed instead, and nothing is remembered.

    Args:
        calls: how many to time in a row.
        progress: is told what is checked next.
    """
    choice = dispatch.device_choice()
    verdicts = {}
    for op, variant in kernels:
        progress(f"{op} {variant}".rstrip())
        one = check(op, variant)
        if choice.backend == "reference":
            verdict = Verdict(True, microseconds=time_reference(one, calls=1))
        else:
            verdict = run_check(one, choice.backend, calls)
            remember({_key(one, choice.backend): verdict})
        verdicts[op, variant] = verdict
    return _findings(verdicts, choice)


def _findings(verdicts: Mapping[tuple[str, str], Verdict], choice: dispatch.Choice) -> list[Finding]:
    """What each kernel's op runs on: the device's choice, unless it or its fellow failed."""
    findings = []
    for (op, variant), verdict in verdicts.items():
        fellow = FELLOWS.get(op, op)
        backend, reason = choice.backend, choice.reason
        if not verdict.ok:
            backend, reason = "reference", f"its kernel failed the check on this machine: {verdict.message}"
        elif not verdicts.get((fellow, variant), verdict).ok:
            backend, reason = "reference", f"it goes with {fellow}, whose kernel failed the check on this machine"
        findings.append(Finding(op, variant, backend, reason, verdict))
    return findings


def read_verdicts() -> dict[str, Verdict]:
    """All that is remembered, by key; nothing, with a warning, where the file is not one of ours."""
    path = _path()
    try:
        return _parsed(path) if path is not None and path.exists() else {}
    except _NOT_OURS as error:
        logger.warning("%s is ignored: %s", path, one_line(str(error)))
        return {}


def remember(new: Mapping[str, Verdict]) -> None:
    """Add verdicts to the file, which is replaced as a whole; without a folder that can be written, do nothing."""
    path = _path()
    if path is None:
        return
    try:  # what is there now, since another process may have added to it
        earlier = _parsed(path)
    except _NOT_OURS:
        earlier = {}
    merged = [*((key, verdict) for key, verdict in earlier.items() if key not in new), *new.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {key: asdict(verdict) for key, verdict in merged[-MAX_VERDICTS:]}
        write_json(path, {"format": FORMAT, "verdicts": entries})
    except OSError as error:
        logger.info("verdicts of kernels are not remembered: %s", error)


def _key(one: Check, backend: str) -> str:
    machine = device()
    name = f"{one.op} {one.variant}".rstrip()
    where = f"{machine.name} ({machine.architecture}), mlx {mx.__version__}"
    return f"{where}, {name}, {kernel_hash(one, backend)}"


def _path() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "verdicts.json"


def _parsed(path: Path) -> dict[str, Verdict]:
    """The file's verdicts; raises ValueError, RecursionError or OSError for one that is not of this format."""
    if not path.is_file():
        raise ValueError("not a file")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    content = json.loads(data)
    entries = content.get("verdicts") if isinstance(content, dict) and content.get("format") == FORMAT else None
    if not isinstance(entries, dict):
        raise ValueError(f"not a file of format {FORMAT!r}")
    return {key: _verdict(fields) for key, fields in entries.items()}


def _verdict(fields: Any) -> Verdict:
    """A verdict from JSON, every field of its type."""
    try:
        verdict = Verdict(**fields)
    except TypeError:
        raise ValueError("an entry has other fields than a verdict") from None
    numbers = (verdict.error, verdict.microseconds)
    if type(verdict.ok) is not bool or not isinstance(verdict.message, str) or not all(map(_is_measure, numbers)):
        raise ValueError("an entry has a field of another type")
    return Verdict(verdict.ok, *numbers, one_line(verdict.message))


def _is_measure(value: Any) -> bool:
    return value is None or (type(value) is float and math.isfinite(value) and value >= 0)
