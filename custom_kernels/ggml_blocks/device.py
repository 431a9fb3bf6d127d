"""Device decoders: what ``reference.py`` defines, as text of portable kernels (custom_kernels/portable.py).

A decoder gives 8 consecutive weights of a row, a ``W8`` of floats, bit-equal to the reference. It sees its block only
through an accessor ``b`` with ``u8``, ``u16`` and ``u32`` at byte offsets of the block as ggml lays it out, so a layout
that puts the bytes elsewhere needs another accessor and no other decoder. ``Row`` and ``Block`` here are those of raw
rows, blocks of any size one after the other at any address; they load byte by byte.

Adding a type is one entry of ``_DECODERS``, and one of ``_TABLES`` if it has a codebook. Codebooks are input arrays of
packed bytes, lowest byte first; signs with parity are computed. Grids of 8 take two words a vector, of 4 one.

A kernel includes ``decoder_header(gate=format, …)``, takes ``table_names(…)`` among its inputs with ``table_arrays(…)``
as their values, and calls ``decode_gate(row_of(pointer), group)``; group 0 is weights 0 to 7 of the row.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from custom_kernels.ggml_blocks.formats import BlockFormat
from custom_kernels.ggml_blocks.tables import IQ4_VALUES, grid_array

GROUP = 8
"""Weights that a decoder gives at once; rows must be whole groups."""

_ACCESS = r"""
struct W8 { float v[8]; };
template <typename P> struct Block {
  P p;
  FN uint u8(uint at) const { return uint(p[at]); }
  FN uint u16(uint at) const { return u8(at) | (u8(at + 1) << 8); }
  FN uint u32(uint at) const { return u16(at) | (u16(at + 2) << 16); }
};
template <typename P> struct Row {
  P p;
  FN Block<P> block(uint i, uint block_bytes) const { return Block<P>{p + size_t(i) * block_bytes}; }
};
template <typename P> FN Row<P> row_of(P p) { return Row<P>{p}; }
"""

_HELPERS = r"""
FN float half_(uint word) { return float(BITS(half, ushort(word))); }
FN uint byte_(uint word, uint i) { return (word >> (8 * (i & 3))) & 255; }
FN float i8_(uint byte) { return float(int(byte ^ 128) - 128); }
FN uint parity_signs_(uint seven) {   // the eighth bit makes the number of set bits even
  uint p = seven ^ (seven >> 4);
  p ^= p >> 2;
  p ^= p >> 1;
  return seven | ((p & 1) << 7);
}
FN W8 signed_(float scale, uint low, uint high, uint signs) {
  W8 w;
  for (uint i = 0; i < 8; ++i) {
    const float m = float(byte_(i < 4 ? low : high, i));
    w.v[i] = scale * (((signs >> i) & 1) ? -m : m);
  }
  return w;
}
FN W8 shifted_(float scale, uint low, uint high, float shift) {
  W8 w;
  for (uint i = 0; i < 8; ++i) w.v[i] = scale * (i8_(byte_(i < 4 ? low : high, i)) + shift);
  return w;
}
"""

_K_SCALES = r"""
  const uint r = g >> 2, j = r & 3;
  const uint s = r < 4 ? b.u8(4 + j) & 63 : (b.u8(12 + j) & 15) | ((b.u8(4 + j) >> 6) << 4);
  const uint m = r < 4 ? b.u8(8 + j) & 63 : (b.u8(12 + j) >> 4) | ((b.u8(8 + j) >> 6) << 4);
  const float scale = half_(b.u16(0)) * float(s), least = half_(b.u16(2)) * float(m);
"""

# Bodies see the block b, the group's number g in it and, of types in _TABLES, the table; they return a W8.
_DECODERS: dict[str, str] = {
    "F32": r"""
  W8 w;
  for (uint i = 0; i < 8; ++i) w.v[i] = BITS(float, b.u32(4 * i));
  return w;
""",
    "F16": r"""
  W8 w;
  for (uint i = 0; i < 8; ++i) w.v[i] = half_(b.u16(2 * i));
  return w;
""",
    "BF16": r"""
  W8 w;
  for (uint i = 0; i < 8; ++i) w.v[i] = BITS(float, b.u16(2 * i) << 16);
  return w;
""",
    "Q2_0": r"""
  const float d = half_(b.u16(0));
  const uint codes = b.u16(2 + 2 * g);
  W8 w;
  for (uint i = 0; i < 8; ++i) w.v[i] = d * (float((codes >> (2 * i)) & 3) - 1.0f);
  return w;
""",
    "Q5_1": r"""
  const float d = half_(b.u16(0)), m = half_(b.u16(2));
  const uint high = b.u8(4 + g);
  W8 w;
  for (uint i = 0; i < 8; ++i) {
    const uint code = ((b.u8(8 + 8 * (g & 1) + i) >> (4 * (g >> 1))) & 15) | (((high >> i) & 1) << 4);
    w.v[i] = d * float(code) + m;
  }
  return w;
""",
    "Q8_0": r"""
  const float d = half_(b.u16(0));
  W8 w;
  for (uint i = 0; i < 8; ++i) w.v[i] = d * i8_(b.u8(2 + 8 * g + i));
  return w;
""",
    "Q4_K": _K_SCALES
    + r"""
  W8 w;
  for (uint i = 0; i < 8; ++i) {
    const uint code = (b.u8(16 + 32 * (r >> 1) + 8 * (g & 3) + i) >> (4 * (r & 1))) & 15;
    w.v[i] = scale * float(code) - least;
  }
  return w;
""",
    "Q5_K": _K_SCALES
    + r"""
  W8 w;
  for (uint i = 0; i < 8; ++i) {
    const uint l = 8 * (g & 3) + i;
    const uint code = ((b.u8(48 + 32 * (r >> 1) + l) >> (4 * (r & 1))) & 15) | (((b.u8(16 + l) >> r) & 1) << 4);
    w.v[i] = scale * float(code) - least;
  }
  return w;
""",
    "Q6_K": r"""
  const uint h = g >> 4, r = (g >> 2) & 3;
  const float scale = half_(b.u16(208)) * i8_(b.u8(192 + (g >> 1)));
  W8 w;
  for (uint i = 0; i < 8; ++i) {
    const uint l = 8 * (g & 3) + i;
    const uint low = (b.u8(64 * h + 32 * (r & 1) + l) >> (4 * (r >> 1))) & 15;
    const uint code = low | (((b.u8(128 + 32 * h + l) >> (2 * r)) & 3) << 4);
    w.v[i] = scale * (float(code) - 32.0f);
  }
  return w;
""",
    "IQ4_NL": r"""
  const float d = half_(b.u16(0));
  W8 w;
  for (uint i = 0; i < 8; ++i) {
    const uint code = (b.u8(2 + 8 * (g & 1) + i) >> (4 * (g >> 1))) & 15;
    w.v[i] = d * i8_(byte_(table[code >> 2], code));
  }
  return w;
""",
    "IQ4_XS": r"""
  const uint r = g >> 2;
  const uint low = (b.u8(4 + (r >> 1)) >> (4 * (r & 1))) & 15, high = (b.u16(2) >> (2 * r)) & 3;
  const float scale = half_(b.u16(0)) * (float(low + 16 * high) - 32.0f);
  W8 w;
  for (uint i = 0; i < 8; ++i) {
    const uint code = (b.u8(8 + 16 * r + 8 * (g & 1) + i) >> (4 * ((g >> 1) & 1))) & 15;
    w.v[i] = scale * i8_(byte_(table[code >> 2], code));
  }
  return w;
""",
    "IQ2_XXS": r"""
  const uint at = 2 + 8 * (g >> 2), q = g & 3;
  const uint index = b.u8(at + q), word = b.u32(at + 4);
  const float scale = half_(b.u16(0)) * (float(word >> 28) + 0.5f) * 0.25f;
  return signed_(scale, table[2 * index], table[2 * index + 1], parity_signs_((word >> (7 * q)) & 127));
""",
    "IQ2_XS": r"""
  const uint word = b.u16(2 + 2 * g), index = word & 511;
  const uint s = (b.u8(66 + (g >> 2)) >> (4 * ((g >> 1) & 1))) & 15;
  const float scale = half_(b.u16(0)) * (float(s) + 0.5f) * 0.25f;
  return signed_(scale, table[2 * index], table[2 * index + 1], parity_signs_(word >> 9));
""",
    "IQ2_S": r"""
  const uint index = b.u8(2 + g) | (((b.u8(66 + (g >> 2)) >> (2 * (g & 3))) & 3) << 8);
  const uint s = (b.u8(74 + (g >> 2)) >> (4 * ((g >> 1) & 1))) & 15;
  const float scale = half_(b.u16(0)) * (float(s) + 0.5f) * 0.25f;
  return signed_(scale, table[2 * index], table[2 * index + 1], b.u8(34 + g));
""",
    "IQ3_XXS": r"""
  const uint word = b.u32(66 + 4 * (g >> 2));
  const float scale = half_(b.u16(0)) * (float(word >> 28) + 0.5f) * 0.5f;
  const uint signs = parity_signs_((word >> (7 * (g & 3))) & 127);
  return signed_(scale, table[b.u8(2 + 2 * g)], table[b.u8(3 + 2 * g)], signs);
""",
    "IQ3_S": r"""
  const uint high = b.u8(66 + (g >> 2)) >> (2 * (g & 3));
  const uint first = b.u8(2 + 2 * g) | ((high & 1) << 8), second = b.u8(3 + 2 * g) | (((high >> 1) & 1) << 8);
  const uint s = (b.u8(106 + (g >> 3)) >> (4 * ((g >> 2) & 1))) & 15;
  return signed_(half_(b.u16(0)) * float(2 * s + 1), table[first], table[second], b.u8(74 + g));
""",
    "IQ1_S": r"""
  const uint word = b.u16(34 + 2 * (g >> 2));
  const uint index = b.u8(2 + g) | (((word >> (3 * (g & 3))) & 7) << 8);
  const float scale = half_(b.u16(0)) * float(2 * ((word >> 12) & 7) + 1);
  return shifted_(scale, table[2 * index], table[2 * index + 1], (word >> 15) ? -0.125f : 0.125f);
""",
    "IQ1_M": r"""
  const uint nibble = (b.u8(32 + (g >> 1)) >> (4 * (g & 1))) & 15;
  const uint index = b.u8(g) | ((nibble & 7) << 8);
  uint d = 0;
  for (uint k = 0; k < 4; ++k) d |= (b.u16(48 + 2 * k) >> 12) << (4 * k);
  const uint s = (b.u16(48 + 2 * (g >> 3)) >> (3 * ((g >> 1) & 3))) & 7;
  const float scale = half_(d) * float(2 * s + 1);
  return shifted_(scale, table[2 * index], table[2 * index + 1], (nibble >> 3) ? -0.125f : 0.125f);
""",
}

_TABLES = {
    "IQ4_NL": "IQ4",
    "IQ4_XS": "IQ4",
    "IQ2_XXS": "IQ2_XXS",
    "IQ2_XS": "IQ2_XS",
    "IQ2_S": "IQ2_S",
    "IQ3_XXS": "IQ3_XXS",
    "IQ3_S": "IQ3_S",
    "IQ1_S": "IQ1_S",
    "IQ1_M": "IQ1_S",
}


def has_decoder(format: BlockFormat) -> bool:
    """Whether kernels can read this format."""
    return format.name in _DECODERS


def decoder_header(**roles: BlockFormat) -> str:
    """The header text of a kernel that calls ``decode_<role>(row, group)`` for every role; each type's text once."""
    names = dict.fromkeys(format.name for format in roles.values())
    formats = {format.name: format for format in roles.values()}
    parts = [_ACCESS, _HELPERS, *(_function(formats[name]) for name in names)]
    for role, format in roles.items():
        table = f", {_input_name(format.name)}" if format.name in _TABLES else ""
        parts.append(f"#define decode_{role}(row, group) decode_{format.name}_(row, group{table})\n")
    return "".join(parts)


def table_names(*formats: BlockFormat) -> list[str]:
    """Names of the inputs that hold these formats' codebooks, each once."""
    return list(dict.fromkeys(_input_name(format.name) for format in formats if format.name in _TABLES))


def table_arrays(*formats: BlockFormat) -> list[mx.array]:
    """What goes in for ``table_names``: uint32, at least 8 elements, the same arrays at every call."""
    return [_table(name) for name in dict.fromkeys(_TABLES[f.name] for f in formats if f.name in _TABLES)]


@cache
def _table(name: str) -> mx.array:
    twice = np.tile(np.array(IQ4_VALUES, dtype=np.int8), 2)  # 8 words
    packed = twice if name == "IQ4" else grid_array(name)
    return mx.array(np.ascontiguousarray(packed).reshape(-1).view(np.uint32))


def _input_name(name: str) -> str:
    return f"table_{_TABLES[name]}"


def _function(format: BlockFormat) -> str:
    """One decoder as a function of the row; formats of single weights count as blocks of a group."""
    unit = max(format.block_weights, GROUP)
    table = format.name in _TABLES
    return (
        f"template <typename R{', typename G' if table else ''}> "
        f"FN W8 decode_{format.name}_(R row, uint group{', G table' if table else ''}) {{\n"
        f"  const auto b = row.block(group / {unit // GROUP}, {format.row_bytes(unit)});\n"
        f"  const uint g = group % {unit // GROUP};{_DECODERS[format.name]}}}\n"
    )
