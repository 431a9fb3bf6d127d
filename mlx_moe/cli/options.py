"""Options that verbs share, with mlx-lm's names and defaults. Parsing imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    pass

DTYPES = ("float32", "bfloat16", "float16")
EVERY = "none"
"""As a rank: no limit."""
_NO_IMAGES = "this runs the text model only"
# Options of mlx-lm that cannot work here: (flag, number of values, reason). The keyword's reason is
# mlx_moe.generation.UNSUPPORTED; it is looked up when the flag is met.
_REFUSED: tuple[tuple[str, str | None, str | None], ...] = (
    ("--kv-bits", "kv_bits", None),
    ("--kv-group-size", "kv_group_size", None),
    ("--quantized-kv-start", "quantized_kv_start", None),
    ("--max-kv-size", "max_kv_size", None),
    ("--draft-model", "draft_model", None),
    ("--num-draft-tokens", "num_draft_tokens", None),
    ("--adapter-path", "adapter_path", None),
    ("--image", None, _NO_IMAGES),
    ("--trust-remote-code", None, "code from model repositories is never run"),
    ("--use-default-chat-template", None, "there is no default template; the tokenizer's own is used where it has one"),
    ("--quantize-activations", None, "activations stay unquantised"),
    ("-qa", None, "activations stay unquantised"),
)


class _Refuse(argparse.Action):
    """Stops with the reason why an option of mlx-lm cannot be used."""

    def __init__(self, option_strings: Sequence[str], dest: str, keyword: str | None, reason: str | None, **_: Any):
        super().__init__(option_strings, dest, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._keyword, self._reason = keyword, reason

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        reason = self._reason
        if self._keyword:
            from mlx_moe.generation import UNSUPPORTED

            reason = UNSUPPORTED[self._keyword]
        parser.error(f"{option} cannot be used with this model: {reason}")


class _Parser(argparse.ArgumentParser):
    """Errors of use are one line; --help lists the options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def plain_parser(verb: str, description: str) -> argparse.ArgumentParser:
    """A parser without options. Abbreviations are off, so refusals name the flag."""
    return _Parser(prog=f"mlx-moe {verb}", description=description, allow_abbrev=False)


def parser(verb: str, description: str, prompts: bool = True) -> argparse.ArgumentParser:
    """A parser with the model options and the refused ones. prompts: whether the verb runs any."""
    out = plain_parser(verb, description)
    out.add_argument("--model", help="model folder, GGUF file or Hub repository (default: the demonstration model)")
    out.add_argument(
        "--mtp",
        default="auto",
        metavar="FILE",
        help="GGUF file of the draft layer, or none (default: auto, the model's own or one beside its GGUF file)",
    )
    out.add_argument(
        "--dtype", choices=DTYPES, help="type to compute in (default: the file's, or float32 without a GPU)"
    )
    if prompts:
        out.add_argument("--prefill-step-size", type=int, default=2048, help="prompt tokens per pass (default: 2048)")
    _add_paging(out)
    _add_usage(out)
    _add_moce(out)
    for flag, keyword, reason in _REFUSED:
        out.add_argument(flag, action=_Refuse, keyword=keyword, reason=reason)
    return out


def _add_paging(out: argparse.ArgumentParser) -> None:
    """Where experts are kept. Defaults are those of ``load_model``, so absent ones are None."""
    out.add_argument("--memory", metavar="SIZE", help="ceiling of this process, as 10GB (default: the machine's)")
    out.add_argument("--expert-slots", type=int, metavar="N", help="experts per layer in memory (default: what fits)")
    out.add_argument("--resident", action="store_true", default=None, help="all experts in memory, or stop")
    out.add_argument("--io-threads", type=int, metavar="N", help="threads that read experts (default: 12)")
    out.add_argument(
        "--no-read-ahead",
        action="store_false",
        dest="read_ahead",
        default=None,
        help="do not read what the next layer will probably need",
    )
    out.add_argument(
        "--read-by-token",
        action="store_true",
        default=None,
        help="read ahead, too, what a token used in earlier text: more hits, more bytes",
    )
    out.add_argument("--io", choices=("direct", "buffered"), help="past the page cache or through it (default: direct)")


def _add_usage(out: argparse.ArgumentParser) -> None:
    """Which experts that stream are in memory. Defaults are those of ``load_model``, so absent ones are None."""
    out.add_argument(
        "--seed-residency",
        choices=("usage", "profile", "empty"),
        help="which experts are in memory first (default: usage, or profile with --moce or --no-usage)",
    )
    out.add_argument(
        "--no-usage",
        action="store_false",
        dest="usage",
        default=None,
        help="neither read nor write what is remembered of the use of experts",
    )
    out.add_argument(
        "--eviction",
        choices=("frequency", "lru"),
        help="who leaves memory first: used least, or longest ago (default: frequency, or lru with --no-usage)",
    )


def _add_moce(out: argparse.ArgumentParser) -> None:
    """Cache-aware routing. Defaults are the model's own or MoceConfig's, so absent ones are None."""
    out.add_argument("--moce", action="store_true", help="prefer experts in memory while decoding; changes output")
    out.add_argument(
        "--moce-bonus", type=float, metavar="X", help="on their logits, 0 for none (default: the model's, else 0.85)"
    )
    out.add_argument("--moce-keep-top", type=int, metavar="N", help="best experts taken as they are (default: same, 3)")
    out.add_argument(
        "--moce-max-rank",
        type=_rank,
        metavar="N",
        help="promote from the N best, or 'none' for all (default: same, 24)",
    )


def add_recording(out: argparse.ArgumentParser) -> None:
    """Of verbs that run a model token by token."""
    out.add_argument(
        "--record-routing", metavar="FILE", help="write what routers say there (scripts/replay_routing.py)"
    )


def paging(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of ``load`` for the options of paging, of recording and of cache-aware routing that were given."""
    names = ("memory", "expert_slots", "resident", "io_threads", "read_ahead", "read_by_token", "io")
    names += ("prefill_step_size", "usage", "seed_residency", "eviction", "record_routing")
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    settings = moce(args)
    return given if settings is None else given | {"moce": settings}


def moce(args: argparse.Namespace, measure: bool = False) -> dict[str, Any] | None:
    """Changes to the model's own cache-aware routing; None without --moce, which they need (ValueError).

    measure: count divergences whether or not statistics are to be written.
    """
    names = ("bonus", "keep_top", "max_rank")
    given = {name: value for name in names if (value := getattr(args, f"moce_{name}")) is not None}
    if not args.moce:
        if given:
            raise ValueError(f"--moce-{next(iter(given)).replace('_', '-')} needs --moce")
        return None
    if given.get("max_rank") == EVERY:
        given["max_rank"] = None
    return given | {"measure": measure or getattr(args, "stats_json", None) is not None}


def add_sampling(out: argparse.ArgumentParser, temp: float | None, top_p: float | None, top_k: int | None) -> None:
    """Sampler options; None as a default leaves the choice to the model's own settings."""
    out.add_argument("--temp", type=float, default=temp, help=f"temperature (default: {_shown(temp)})")
    out.add_argument("--top-p", type=float, default=top_p, help=f"nucleus (default: {_shown(top_p)})")
    out.add_argument("--top-k", type=int, default=top_k, help=f"best k, 0 for all (default: {_shown(top_k)})")
    out.add_argument("--min-p", type=float, default=0.0, help="least share of the best probability (default: 0)")
    out.add_argument("--min-tokens-to-keep", type=int, default=1, help="with --min-p (default: 1)")
    out.add_argument("--xtc-probability", type=float, default=0.0, help="exclude top choices this often (default: 0)")
    out.add_argument("--xtc-threshold", type=float, default=0.1, help="of the choices excluded (default: 0.1)")
    out.add_argument("--seed", type=_seed, help="seed of the random numbers")


def add_template(out: argparse.ArgumentParser, ignorable: bool = True) -> None:
    """Chat-template options; ``ignorable``: with one to go without."""
    if ignorable:
        out.add_argument("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    out.add_argument("--system-prompt", help="system message of the chat template")
    out.add_argument(
        "--chat-template-config",
        type=_json_object,
        default={},
        metavar="JSON",
        help="""arguments of the chat template, such as '{"enable_thinking": false}'""",
    )


def check_folder(flag: str, file: str) -> None:
    """Before anything is loaded: raises ValueError if the folder that a file is to be written to does not exist."""
    if not Path(file).resolve().parent.is_dir():
        raise ValueError(f"{flag} {file}: its folder does not exist")


def read_prompt(text: str) -> str:
    """A prompt from the command line: '-' reads standard input, and \\n and \\t are what they say, as in mlx-lm."""
    return sys.stdin.read() if text == "-" else text.replace("\\n", "\n").replace("\\t", "\t")


def _shown(value: Any) -> str:
    return "the model's" if value is None else str(value)


def _rank(text: str) -> int | str:
    if text != EVERY and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number or '{EVERY}'")
    return text if text == EVERY else int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text[:21]) >= 1 << 64:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 0 to 2^64 - 1")
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("needed: a JSON object")
    return value


def truth(text: str) -> bool:
    """mlx-lm's booleans: T, F, true, false."""
    value = text.lower()
    if value not in ("t", "true", "f", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is not T or F")
    return value in ("t", "true")
