"""What a conversion shall make: the user's choices, and what they mean for one model."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from custom_kernels.ggml_blocks import BlockFormat, format_by_name
from mlx_moe.config import ConfigError
from mlx_moe.conversion.source import Source
from mlx_moe.conversion.stored import FP8

logger = logging.getLogger(__name__)

EXPERT_FORMATS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "q2_0", "iq4_nl", "q8_0", "bf16")
TABLE_FORMATS = ("iq4_nl", "q8_0", "bf16")
DENSE = ("8", "6", "4", "bf16")
KEEP, LEAVE = "keep", "leave"
LEAST_MEMORY = 1_000_000_000
"""Bytes: the interpreter, MLX and the making of a tokenizer of 250,000 words take 640 MB."""


@dataclass(frozen=True)
class Choices:
    """None leaves a choice to the kind of source: GGUF files are kept, others get small types that fit their widths.

    Attributes:
        experts: KEEP or one of EXPERT_FORMATS, for gate and up.
        down: the same, for down.
        dense: KEEP or one of DENSE; digits are bits of ``mx.quantize``.
        ngram: KEEP or one of TABLE_FORMATS.
        copy_table: copy a GGUF's table into the pack, which is else left where it is.
        memory_bytes: what the process may use.
        norm_convention: as for ``load_model``; of Hugging Face folders.
    """

    experts: str | None = None
    down: str | None = None
    dense: str | None = None
    ngram: str | None = None
    copy_table: bool = False
    memory_bytes: int = 8_000_000_000
    norm_convention: str = "auto"

    def __post_init__(self) -> None:
        for flag, value, allowed in (
            ("experts", self.experts, EXPERT_FORMATS),
            ("down", self.down, EXPERT_FORMATS),
            ("dense", self.dense, DENSE),
            ("ngram", self.ngram, TABLE_FORMATS),
        ):
            if value not in (None, KEEP, *allowed):
                raise ConfigError(f"--{flag} is {value!r}; supported: {', '.join((KEEP, *allowed))}")
        if self.memory_bytes < LEAST_MEMORY:
            needed = f"needed: at least {LEAST_MEMORY // 10**6}MB"
            raise ConfigError(f"--memory is {self.memory_bytes / 1e6:.0f}MB; {needed}")


@dataclass(frozen=True)
class Targets:
    """Choices with every blank filled in.

    Attributes:
        gate_up, down: formats, or None to keep what a layer has.
        dense: KEEP, or one of DENSE.
        table: a format, None to keep, LEAVE for a reference.
    """

    gate_up: BlockFormat | None
    down: BlockFormat | None
    dense: str
    table: BlockFormat | str | None


def targets(source: Source, choices: Choices) -> Targets:
    """Raises ConfigError, naming the flag, when a format does not divide the model's rows or cannot be kept."""
    config = source.config
    found = {layer.formats for layer in source.layers}
    gate_up = _experts(source, "experts", choices.experts, config.hidden_size, ("iq2_xs", "q2_0", "iq4_nl"))
    down = _experts(source, "down", choices.down, config.moe_intermediate_size, ("q2_0", "iq4_nl"), choices.experts)
    for flag, target, kinds in (
        ("experts", gate_up, {kind for formats in found for kind in formats[:2]}),
        ("down", down, {formats[2] for formats in found}),
    ):
        _check_kept(flag, target, kinds)
    out = Targets(gate_up, down, choices.dense or (KEEP if source.kind == "GGUF" else "8"), _table(source, choices))
    logger.info("experts %s, down %s, dense %s, table %s", *map(_shown, (gate_up, down, out.dense, out.table)))
    return out


def _experts(
    source: Source, flag: str, choice: str | None, width: int, defaults: tuple[str, ...], beside: str | None = None
) -> BlockFormat | None:
    """The format of one kind of matrix. ``beside`` is the choice for gate and up, which decides what None means."""
    if choice is None and source.kind == "GGUF" and beside in (None, KEEP):
        return None
    if choice is None and beside in (KEEP, "bf16", "q8_0"):
        choice = beside
    if choice == KEEP:
        return None
    if choice is None:
        return _first_fitting(defaults, width)
    return _fitting(flag, choice, width)


def _first_fitting(names: tuple[str, ...], width: int) -> BlockFormat:
    formats = [format_by_name(name.upper()) for name in names]
    return next((form for form in formats if width % form.block_weights == 0), format_by_name("BF16"))


def _fitting(flag: str, choice: str, width: int) -> BlockFormat:
    form = format_by_name(choice.upper())
    if width % form.block_weights:
        fits = [name for name in EXPERT_FORMATS if width % format_by_name(name.upper()).block_weights == 0]
        blocks = f"its blocks of {form.block_weights} weights do not divide rows of {width}"
        raise ConfigError(f"--{flag} is {choice}: {blocks}; possible: {', '.join(fits)}")
    return form


def _check_kept(flag: str, target: BlockFormat | None, kinds: set[str]) -> None:
    if target is None and FP8 in kinds:
        raise ConfigError(f"--{flag} is keep: a pack holds no FP8; supported: {', '.join(EXPERT_FORMATS)}")


def _table(source: Source, choices: Choices) -> BlockFormat | str | None:
    if source.table is None:
        return None
    width, kind = source.table[0].shape[1], source.table[0].format
    choice = choices.ngram
    if source.place is not None and choice in (None, KEEP):
        return None if choices.copy_table else LEAVE
    if choice == KEEP:
        if kind == FP8:
            raise ConfigError(f"--ngram is keep: a pack holds no FP8; supported: {', '.join(TABLE_FORMATS)}")
        return None
    return _first_fitting(("iq4_nl",), width) if choice is None else _fitting("ngram", choice, width)


def _shown(target: BlockFormat | str | None) -> str:
    return KEEP if target is None else target if isinstance(target, str) else target.name
