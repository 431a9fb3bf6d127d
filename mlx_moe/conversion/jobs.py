"""The pieces of work of a conversion: tensors of a pack, and how their bytes come about.

A job is a generator of bytes, in order, that can start at any of its units; what it holds at one time is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from custom_kernels.ggml_blocks import BlockFormat, format_by_name, quantize
from mlx_moe.conversion.choices import KEEP
from mlx_moe.conversion.imatrix import Importances, importance
from mlx_moe.conversion.source import Dense, LayerSource
from mlx_moe.conversion.stored import BAND_WEIGHTS, FP8, Stored, encoded, is_plain
from mlx_moe.formats.pack import RecordLayout, TensorSpec
from mlx_moe.formats.pack.layout import PARTS
from mlx_moe.models.qwen4_exp.sanitize import is_norm

GROUP_SIZES = (64, 32)
_COPY_BYTES = 2 << 20
NOT_PACKED = ("mlp.gate", "shared_expert_gate", "block_inject_weight", "in_proj_a", "in_proj_b")
"""Routers and scalar gates: small, and what they decide is felt everywhere."""


@dataclass(frozen=True)
class Job:
    """Tensors that follow each other in a file.

    Attributes:
        specs: the tensors.
        unit_bytes: the work can start at every multiple of this; 0: at the beginning only.
        produce: the bytes from unit number n on, in pieces; each is valid until the next is asked for.
    """

    specs: tuple[TensorSpec, ...]
    unit_bytes: int
    produce: Callable[[int], Iterator[memoryview]]

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(spec.nbytes for spec in self.specs)


def expert_job(layer: LayerSource, layout: RecordLayout, importances: Importances, batch_bytes: int) -> Job:
    """One layer's records [experts, stride]."""
    experts = len(layer.gate)
    batch = min(experts, max(1, batch_bytes // layout.stride))

    def produce(start: int) -> Iterator[memoryview]:
        buffer = np.zeros((batch, layout.stride), dtype=np.uint8)  # what lies between parts stays zero
        for first in range(start, experts, batch):
            records = buffer[: min(batch, experts - first)]
            for i, record in enumerate(records):
                _fill(record, layer, layout, importances, first + i)
            yield memoryview(records)

    spec = TensorSpec(f"{layer.name}.mlp.experts.records", "U8", (experts, layout.stride))
    return Job((spec,), layout.stride, produce)


def _fill(record: np.ndarray, layer: LayerSource, layout: RecordLayout, importances: Importances, expert: int) -> None:
    for name, part, matrices in zip(PARTS, layout.parts, layer.parts, strict=True):
        target, matrix = record[part.offset : part.offset + part.length], matrices[expert]
        if matrix.format == part.format.name:
            matrix.read_into(target)
        else:
            weights = importance(importances, layer.name, name, expert)
            convert_rows(matrix, part.format, target.reshape(matrix.shape[0], -1), 0, weights)


def convert_rows(
    matrix: Stored, format: BlockFormat, target: np.ndarray, start: int = 0, weights: mx.array | None = None
) -> None:
    """Rows from ``start`` on in another format, into target [rows, row_bytes] uint8."""
    end = start + len(target)
    for first, stop in matrix.bands(start):
        stop = min(stop, end)
        if first < stop:
            numbers = matrix.numbers(first, stop)
            target[first - start : stop - start] = _coded(numbers, format, weights)


def _coded(numbers: mx.array, format: BlockFormat, weights: mx.array | None) -> np.ndarray:
    if is_plain(format.name):
        return encoded(numbers, format)
    return np.array(quantize(numbers, format, weights), copy=False)


def table_job(name: str, parts: Sequence[Stored], format: BlockFormat, batch_bytes: int) -> Job:
    """The n-gram table, uint8 [rows, row_bytes]."""
    rows, width = sum(part.shape[0] for part in parts), parts[0].shape[1]
    row_bytes = format.row_bytes(width)
    step = max(1, batch_bytes // row_bytes)

    def produce(start: int) -> Iterator[memoryview]:
        buffer = np.empty((min(step, rows), row_bytes), dtype=np.uint8)
        for part in parts:
            for first in range(min(start, part.shape[0]), part.shape[0], step):
                target = buffer[: min(step, part.shape[0] - first)]
                if part.format == format.name:
                    part.read_into(target, first)
                else:
                    convert_rows(part, format, target, first)
                yield memoryview(target)
            start = max(0, start - part.shape[0])

    return Job((TensorSpec(name, "U8", (rows, row_bytes)),), row_bytes, produce)


def dense_job(weight: Dense, choice: str) -> tuple[Job, str | None]:
    """A dense weight in the chosen type, and the name of its block format if it is kept as blocks."""
    if bits := bits_of(weight, choice):
        return _quantised_job(weight, bits, group_size(weight)), None
    kept = format_of(weight, choice)
    columns = weight.shape[-1] if len(weight.shape) > 1 else 1
    row_bytes = kept.row_bytes(columns)
    plain = is_plain(kept.name)
    shape = weight.shape if plain else (*weight.shape[:-1], row_bytes)
    spec = TensorSpec(weight.name, kept.name if plain else "U8", shape)
    same = weight.stored if weight.stored is not None and weight.stored.format == kept.name else None
    produce = partial(_copied, same) if same is not None else partial(_written, weight, kept)
    return Job((spec,), row_bytes, produce), None if plain else kept.name


def _copied(stored: Stored, start: int) -> Iterator[memoryview]:
    """Rows as they are in the file."""
    step = max(1, _COPY_BYTES // stored.row_bytes)
    buffer = np.empty((min(step, stored.shape[0]), stored.row_bytes), dtype=np.uint8)
    for first in range(start, stored.shape[0], step):
        target = buffer[: min(step, stored.shape[0] - first)]
        stored.read_into(target, first)
        yield memoryview(target)


def _written(weight: Dense, kept: BlockFormat, start: int) -> Iterator[memoryview]:
    """Rows of a weight that is made, or whose type changes."""
    for first, stop in _bands(weight, start):
        part = weight.read(first, stop)
        if part.data.dtype == mx.uint8 and part.format == kept:
            yield memoryview(np.array(part.data)).cast("B")
        else:
            yield memoryview(encoded(part.numbers().reshape(stop - first, -1), kept)).cast("B")


def bits_of(weight: Dense, choice: str) -> int | None:
    """Bits of ``mx.quantize`` for this weight, or None when it is not packed so."""
    packed = choice.isdecimal() and is_matrix(weight) and group_size(weight)
    return int(choice) if packed and not weight.name.removesuffix(".weight").endswith(NOT_PACKED) else None


def group_size(weight: Dense) -> int:
    """The largest group that divides the rows, 0 if none does."""
    return next((size for size in GROUP_SIZES if weight.shape[-1] % size == 0), 0)


def format_of(weight: Dense, choice: str) -> BlockFormat:
    """The format of a weight that ``mx.quantize`` does not pack: as it is, or BF16 where matrices shall be numbers."""
    plain = is_plain(weight.format)
    routers = weight.name.removesuffix(".weight").endswith(NOT_PACKED)
    if (choice == KEEP and weight.format != FP8) or (plain and (routers or not is_matrix(weight))):
        return format_by_name(weight.format)
    return format_by_name("BF16")


def is_matrix(weight: Dense) -> bool:
    """Whether this is a matrix of a product, or the embedding."""
    odd = is_norm(weight.name) or weight.name.endswith("conv1d.weight")
    return len(weight.shape) == 2 and weight.name.endswith(".weight") and not odd


def _bands(weight: Dense, start: int) -> Iterator[tuple[int, int]]:
    columns = max(1, int(np.prod(weight.shape[1:])))
    step = max(1, BAND_WEIGHTS // columns)
    for first in range(start, weight.shape[0], step):
        yield first, min(first + step, weight.shape[0])


def _quantised_job(weight: Dense, bits: int, group: int) -> Job:
    """The three tensors of an affine ``mx.quantize`` of the weight in BF16; scales and biases wait in memory."""
    rows, columns = weight.shape
    base = weight.name.removesuffix("weight")
    specs = (
        TensorSpec(weight.name, "U32", (rows, columns * bits // 32)),
        TensorSpec(f"{base}scales", "BF16", (rows, columns // group)),
        TensorSpec(f"{base}biases", "BF16", (rows, columns // group)),
    )

    def produce(start: int) -> Iterator[memoryview]:
        rest: tuple[list[mx.array], list[mx.array]] = [], []
        for first, stop in _bands(weight, start):
            packed, *small = mx.quantize(weight.read(first, stop).numbers().astype(mx.bfloat16), group, bits)
            mx.eval(packed, *small)
            yield memoryview(np.array(packed).reshape(-1).view(np.uint8))
            for parts, part in zip(rest, small, strict=True):
                parts.append(part)
        for parts in rest:
            yield memoryview(encoded(mx.concatenate(parts), format_by_name("BF16")))

    return Job(specs, 0, produce)
