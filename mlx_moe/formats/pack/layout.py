"""What a pack's files say beside their tensors: versions, records, tables and packed weights.

Metadata of every weight file (values are strings, as safetensors demands; most hold JSON):

    format_version   1
    layout           ggml: raw blocks, as in GGUF files
    crc32            {tensor: CRC-32 of its bytes, eight hex digits}
    records          {tensor: {"layer": "model.layers.3", "gate": {"format", "shape", "offset"}, "up": …, "down": …}}
    tables           {tensor: {"format", "width"}}
    blocks           {tensor: format} of dense weights that are kept as blocks, uint8 [rows, row_bytes]

A tensor of records is uint8 [experts, stride]. A record is gate, up and down, each from a multiple of 16 bytes on; the
stride and the tensor's first byte in its file are multiples of 16 KiB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from custom_kernels.ggml_blocks import FORMATS, BlockFormat, format_by_name
from mlx_moe.formats.safetensors import FileFormatError

FORMAT_VERSION = 1
LAYOUT = "ggml"
PAGE_BYTES = 16384
PART_ALIGNMENT = 16
PARTS = ("gate", "up", "down")
_PACKABLE = frozenset(format.name for format in FORMATS)


def aligned(value: int, alignment: int) -> int:
    """The next multiple of ``alignment``."""
    return -(-value // alignment) * alignment


def check_version(where: Path, section: Mapping[str, Any]) -> None:
    """Refuse, by name, what another version has written. ``section`` is a file's metadata or config.json's section."""
    for key, ours in (("format_version", FORMAT_VERSION), ("layout", LAYOUT)):
        found = section.get(key)
        if str(found) != str(ours):
            shown = "missing" if found is None else repr(str(found)[:40])
            remedy = "use a newer version of this package, or convert the model again"
            raise FileFormatError(f"{where}: {key} is {shown}; supported: {ours}; {remedy}")


def read_json(path: Path, metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    """A metadata value that holds a JSON object; empty when it is absent."""
    try:
        value = json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise FileFormatError(f"{path}: metadata {key!r} is not a JSON object; corrupt, convert the model again")
    return value


def packable(where: str, name: Any) -> BlockFormat:
    """The format of this name, if a pack can hold it."""
    if not isinstance(name, str) or name not in _PACKABLE:
        raise FileFormatError(f"{where}: format {str(name)[:40]!r} is not supported ({', '.join(sorted(_PACKABLE))})")
    return format_by_name(name)


@dataclass(frozen=True)
class PartLayout:
    """One matrix of a record: ``length`` bytes from byte ``offset`` on, [outputs, inputs] weights."""

    format: BlockFormat
    shape: tuple[int, int]
    offset: int

    @property
    def length(self) -> int:
        """In bytes, without what pads it."""
        return self.shape[0] * self.format.row_bytes(self.shape[1])


@dataclass(frozen=True)
class RecordLayout:
    """One layer's records, all of one size."""

    parts: tuple[PartLayout, PartLayout, PartLayout]  # gate, up, down

    @classmethod
    def of(cls, formats: tuple[BlockFormat, BlockFormat, BlockFormat], hidden: int, width: int) -> RecordLayout:
        """The record of experts whose gate and up are [width, hidden] and down is [hidden, width]."""
        parts, at = [], 0
        for format, shape in zip(formats, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            parts.append(PartLayout(format, shape, at))
            at = aligned(at + parts[-1].length, PART_ALIGNMENT)
        return cls(tuple(parts))

    @property
    def stride(self) -> int:
        """Bytes from one record to the next."""
        return aligned(self.parts[-1].offset + self.parts[-1].length, PAGE_BYTES)

    @property
    def payload(self) -> int:
        """Bytes of a record's parts, without what pads them."""
        return sum(part.length for part in self.parts)

    def to_json(self, layer: str) -> dict[str, Any]:
        """What the metadata says of the layer called ``layer``."""
        described = {
            name: {"format": part.format.name, "shape": list(part.shape), "offset": part.offset}
            for name, part in zip(PARTS, self.parts, strict=True)
        }
        return {"layer": layer, **described}

    @classmethod
    def from_json(cls, where: str, entry: Any, hidden: int, width: int) -> RecordLayout:
        """Read and check a description. Raises FileFormatError, starting with ``where``."""
        described = [entry.get(name) for name in PARTS] if isinstance(entry, dict) else [None]
        if not all(isinstance(part, dict) for part in described):
            raise FileFormatError(f"{where}: needed: gate, up and down; corrupt, convert the model again")
        formats = tuple(packable(where, part.get("format")) for part in described)
        try:
            layout = cls.of(formats, hidden, width)
        except ValueError as error:
            raise FileFormatError(f"{where}: {error}; the file is of another model or corrupt") from None
        for name, part, found in zip(PARTS, layout.parts, described, strict=True):
            if found.get("shape") != list(part.shape) or found.get("offset") != part.offset:
                got = f"{str(found.get('shape'))[:40]} at {str(found.get('offset'))[:20]}"
                want = f"{list(part.shape)} at {part.offset}"
                raise FileFormatError(f"{where}: {name} is {got}; needed: {want}; of another model or corrupt")
        return layout
