"""``mlx-moe doctor``: the machine, every kernel against its reference, and the price of one device wait."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_moe.cli import options

if TYPE_CHECKING:
    from custom_kernels.dispatch import Choice
    from mlx_moe.verdicts import Finding

WIDTH = 80
"""Of what is printed, in columns."""
REMEDY = (
    "Text stays right, only slower. Update mlx and this package and run 'mlx-moe doctor' again; where that does not "
    "help, report the output of 'mlx-moe doctor --json -'."
)
_HEADS = f"{'error':>10}{'µs':>8}"  # over the error and time of one kernel


READERS = {
    "library": "the package's own threads",
    "python": "Python's threads, slower: its library was not built; install the package again",
}
"""Whose threads read experts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, print; the exit status is 1 where a kernel failed."""
    out = options.plain_parser("doctor", "Check every kernel against its reference on this machine.")
    out.add_argument("--json", metavar="FILE", help="write the findings there, '-' for standard output instead of text")
    args = out.parse_args(argv)
    if args.json not in (None, "-"):
        options.check_folder("--json", args.json)
    from custom_kernels.checks import every_kernel
    from custom_kernels.dispatch import device_choice
    from mlx_moe.verdicts import examine

    machine = _machine()
    findings = examine(every_kernel(), progress=_show_progress)
    _show_progress("")
    choice = device_choice()
    if args.json != "-":
        print("\n".join([*_header(machine), *_table(findings), "", *_summary(findings, choice)]))
    if args.json:
        _write_json(args.json, machine, findings, choice)
    return int(any(not finding.verdict.ok for finding in findings))


def _machine() -> dict[str, Any]:
    """What the findings depend on."""
    import mlx.core as mx

    from mlx_moe import __version__, platform
    from mlx_moe.paging.native_reads import library

    return {
        "mlx-moe": __version__,
        "mlx": mx.__version__,
        "mlx-lm": version("mlx-lm"),
        "python": platform.python_version(),
        "system": platform.system(),
        "device": platform.device(),
        "wait_us": platform.wait_us(),
        "reads": "python" if library() is None else "library",
    }


def _header(machine: dict[str, Any]) -> list[str]:
    device = machine["device"]
    most = device.working_set_bytes
    names = {"mlx-moe": "mlx-moe", "mlx": "mlx", "mlx-lm": "mlx-lm", "python": "Python"}
    return [
        ", ".join(f"{shown} {machine[name]}" for name, shown in names.items()),
        f"device    {device.name} ({device.architecture})",
        f"memory    {device.memory_bytes / 2**30:.1f} GiB" + (f", {most / 2**30:.1f} for the GPU" if most else ""),
        f"system    {machine['system']}",
        f"one wait  {machine['wait_us']:.1f} µs (48 in a row, each after one tiny op)",
        f"reads     by {READERS[machine['reads']]}",
        "",
    ]


def _table(findings: Sequence[Finding]) -> list[str]:
    """Ops with one kernel a line each; then a table for the dense ops on blocks, and one for those on experts."""
    plain = [finding for finding in findings if not finding.variant]
    families: dict[str, list[Finding]] = {}
    for finding in (finding for finding in findings if finding.variant):
        families.setdefault(finding.op.split("_")[0], []).append(finding)
    return [
        _line(f"{'op':<14}", [_HEADS]),
        *(_line(f"{finding.op:<14}", [_cell(finding)]) for finding in plain),
        *(line for family in families.values() for line in _by_format(family)),
    ]


def _by_format(findings: Sequence[Finding]) -> list[str]:
    """A line per block format and a column per op that reads it."""
    rows: dict[str, list[Finding]] = {}
    for finding in findings:
        rows.setdefault(finding.variant.split("+")[0], []).append(finding)
    ops = list(dict.fromkeys(finding.op for finding in findings))
    return [
        "",
        _line(f"{'format':<8}", ops),
        _line(f"{'':<8}", [_HEADS] * len(ops)),
        *(_line(f"{format:<8}", map(_cell, row)) for format, row in rows.items()),
    ]


def _line(name: str, cells: Iterable[str]) -> str:
    return name + "".join(f"{cell:>{len(_HEADS)}}" for cell in cells)


def _cell(finding: Finding) -> str:
    verdict = finding.verdict
    error = "FAILED" if not verdict.ok else _number(verdict.error, ".1e")
    return f"{error:>10}{_number(verdict.microseconds, '.1f'):>8}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form) if value else "0"


def _summary(findings: Sequence[Finding], choice: Choice) -> list[str]:
    """What the ops run on and why; where kernels failed, which and what to do."""
    if choice.backend == "reference":
        text = f"Every op runs on its reference: {choice.reason}. No kernel was checked; times are the references'."
        return _wrapped(text)
    failed = sum(not finding.verdict.ok for finding in findings)
    elsewhere = [finding for finding in findings if finding.backend != choice.backend]
    notes = [f"{finding.name} runs on {finding.backend}: {finding.reason}" for finding in elsewhere]
    rest = "All others run" if elsewhere else "All run"
    notes.append(f"{failed or 'None'} of {len(findings)} kernels failed. {rest} on {choice.backend}: {choice.reason}.")
    return [line for note in [*notes, *[REMEDY] * bool(failed)] for line in _wrapped(note)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)


def _write_json(target: str, machine: dict[str, Any], findings: Sequence[Finding], choice: Choice) -> None:
    from mlx_moe.formats.checkpoint import write_json

    report = {
        **machine,
        "device": asdict(machine["device"]),
        "backend": choice.backend,
        "reason": choice.reason,
        "kernels": [asdict(finding) for finding in findings],
    }
    if target == "-":
        print(json.dumps(report, indent=2))
    else:
        write_json(Path(target), report)


def _show_progress(name: str) -> None:
    """The kernel that is being checked, on a terminal; "" clears the line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[Kchecking {name}" if name else "\r\x1b[K", end="", file=sys.stderr, flush=True)
