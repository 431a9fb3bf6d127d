"""Device decoders: what ``reference.py`` defines, as text of portable kernels (custom_kernels/portable.py).

A decoder gives the 8 weights of a group as a ``Group``: weights scale * m[i] - least, bit-equal to the reference when
computed so without contraction. Where the 8 stand in the row is the format's choice: 4 from ``first_<role>(group)`` and
4 from ``second_<role>(group)`` on, so that no two groups share a byte of codes.

A decoder sees its block only through an accessor ``b`` with ``u8``, ``u16`` and ``u32`` at byte offsets of the block as
ggml lays it out, so a layout that puts the bytes elsewhere needs another accessor and no other decoder. ``Block`` here
is that of raw rows, blocks one after the other; the first byte of a row must be at an even address, at a multiple of
``alignment(format)``. u16 and u32 are read at even offsets only.

Adding a type is one entry of ``_DECODERS``, and one of ``_TABLES`` if it has a codebook. Codebooks are input arrays of
words that kernels copy to threadgroup memory (``table_staging``); signs with parity are computed.

Scales that lie apart from the rows (F8_E4M3) are the kernel's to read: ``scaled_gate(q, scale)`` is the group with the
scale of its tile, and just q for all other formats, for which nobody ever looks at the second.

A kernel includes ``decoder_header(gate=format, …)``, takes ``table_names(…)`` among its inputs with ``table_arrays(…)``
as their values, starts its body with ``table_staging(…)``, and calls ``decode_gate(pointer, group)``.
"""

from __future__ import annotations

import math
from functools import cache

import mlx.core as mx
import numpy as np

from custom_kernels.ggml_blocks.formats import BlockFormat
from custom_kernels.ggml_blocks.tables import IQ4_VALUES, grid_array

GROUP = 8
"""Weights that a decoder gives at once; rows must be whole groups."""

_ACCESS = r"""
struct Group { float scale, least, m[8]; };
template <int ALIGNED, typename P> struct Block {
  P p;
  FN uint u8(uint at) const { return uint(p[at]); }
  FN uint u16(uint at) const { return uint(*CAST(ushort, p + at)); }
  FN uint u32(uint at) const {
    return ALIGNED % 4 == 0 && at % 4 == 0 ? *CAST(uint, p + (at & ~3u)) : u16(at) | (u16(at + 2) << 16);
  }
};
template <int UNIT, int ALIGNED, typename P> FN Block<ALIGNED, P> block_of(P row, uint i) {
  return Block<ALIGNED, P>{row + size_t(i) * UNIT};
}
FN float half_(uint word) { return float(BITS(half, ushort(word))); }
"""

# Of formats whose scales lie apart. A scale of 2^120 or more overflows here, as the decoder's own 256 goes into it.
_TILES = r"""
FN size_t tile_(size_t row, uint group, uint columns) {   // the place of the group's scale among the matrix's
  return row / TILE * ((columns + TILE - 1) / TILE) + group / (TILE / 8);
}
template <int BYTES, typename P> FN float scale_at_(P scales, size_t i) {   // BF16 or F32 out of a record
  return BYTES == 2 ? BITS(float, uint(CAST(ushort, scales)[i]) << 16) : CAST(float, scales)[i];
}
FN Group scaled_(Group q, float scale) {
  q.scale *= scale;
  return q;
}
"""

# Helpers by name; a decoder's text brings those that it mentions.
_HELPERS: dict[str, str] = {
    # 8 unsigned bytes, less ``zero``: 2^23 + n is n in the lowest bits of a float
    "bytes_": r"""
FN Group bytes_(float scale, float least, uint low, uint high, float zero) {
  Group q;
  q.scale = scale;
  q.least = least;
  UNROLL for (uint i = 0; i < 8; ++i)
    q.m[i] = BITS(float, 0x4B000000u | (((i < 4 ? low : high) >> (8 * (i & 3))) & 255u)) - (8388608.0f + zero);
  return q;
}
""",
    "ternary_": r"""
FN Group ternary_(float scale, uint low, uint high, float shift) {
  Group q = bytes_(scale, 0.0f, low, high, 1.0f);
  UNROLL for (uint i = 0; i < 8; ++i) q.m[i] += shift;
  return q;
}
""",
    # bits 0 to 7 twice, 15 apart, so that one shift moves those of two neighbours to bits 15 and 31
    "spread_": r"""
FN uint spread_(uint signs) { return signs * 0x8001u; }
""",
    # of 7 signs, with an eighth that makes their number even; garbage above bit 7 falls between what is used
    "spread7_": r"""
FN uint spread7_(uint signs) { return (signs + (POPCOUNT(signs) << 7)) * 0x8001u; }
""",
    "signed_": r"""
FN Group signed_(float scale, uint a, uint b, uint c, uint d, uint spread) {   // four pairs of halves
  Group q;
  q.scale = scale;
  q.least = 0.0f;
  const uint pairs[4] = {a, b, c, d};
  UNROLL for (uint i = 0; i < 4; ++i) {
    const uint pair = pairs[i] ^ ((spread << (15 - 2 * i)) & 0x80008000u);
    q.m[2 * i] = half_(pair & 0xFFFFu);
    q.m[2 * i + 1] = half_(pair >> 16);
  }
  return q;
}
""",
    # codes in bytes 1 and 3 -> halves of 2^-8 times what they stand for, subnormals included; NaN stays NaN
    "e4m3_": r"""
FN uint e4m3_(uint codes) {
  const uint size = codes & 0x7F007F00u, nan = (size + 0x01000100u) & 0x80008000u;
  return (codes & 0x80008000u) | ((size | nan) >> 1);
}
""",
    "nibbles_": r"""
template <typename G> FN Group nibbles_(float scale, uint codes, G table) {   // low nibbles first, then high ones
  Group q;
  q.scale = scale;
  q.least = 0.0f;
  UNROLL for (uint i = 0; i < 4; ++i) {
    const uint pair = table[(codes >> (8 * i)) & 255u];
    q.m[i] = half_(pair & 0xFFFFu);
    q.m[4 + i] = half_(pair >> 16);
  }
  return q;
}
""",
}

_K_SCALES = r"""
  const uint r = g >> 2, j = r & 3;
  const uint s = r < 4 ? b.u8(4 + j) & 63 : (b.u8(12 + j) & 15) | ((b.u8(4 + j) >> 6) << 4);
  const uint m = r < 4 ? b.u8(8 + j) & 63 : (b.u8(12 + j) >> 4) | ((b.u8(8 + j) >> 6) << 4);
  const float scale = half_(b.u16(0)) * float(s), least = half_(b.u16(2)) * float(m);
"""

# Bodies see the block b, the group's number g in it and, of types in _TABLES, the table; they return a Group.
_DECODERS: dict[str, str] = {
    "F32": r"""
  Group q;
  q.scale = 1.0f;
  q.least = 0.0f;
  UNROLL for (uint i = 0; i < 8; ++i) q.m[i] = BITS(float, b.u32(4 * i));
  return q;
""",
    "F16": r"""
  Group q;
  q.scale = 1.0f;
  q.least = 0.0f;
  UNROLL for (uint i = 0; i < 8; ++i) q.m[i] = half_(b.u16(2 * i));
  return q;
""",
    "BF16": r"""
  Group q;
  q.scale = 1.0f;
  q.least = 0.0f;
  UNROLL for (uint i = 0; i < 8; ++i) q.m[i] = BITS(float, b.u16(2 * i) << 16);
  return q;
""",
    "F8_E4M3": r"""
  Group q;
  q.scale = 256.0f;
  q.least = 0.0f;
  UNROLL for (uint i = 0; i < 2; ++i) {
    const uint codes = b.u32(4 * i), even = e4m3_(codes << 8), odd = e4m3_(codes);
    q.m[4 * i] = half_(even & 0xFFFFu);
    q.m[4 * i + 1] = half_(odd & 0xFFFFu);
    q.m[4 * i + 2] = half_(even >> 16);
    q.m[4 * i + 3] = half_(odd >> 16);
  }
  return q;
""",
    "Q2_0": r"""
  const float d = half_(b.u16(0));
  const uint codes = b.u16(2 + 2 * g);
  Group q;
  q.scale = d;
  q.least = 0.0f;
  UNROLL for (uint i = 0; i < 8; ++i) q.m[i] = BITS(float, 0x4B000000u | ((codes >> (2 * i)) & 3u)) - 8388609.0f;
  return q;
""",
    "Q5_1": r"""
  const uint codes = b.u32(8 + 4 * g), low = b.u32(4) >> (4 * g), high = low >> 16;
  const uint first = ((low & 1) << 4) | ((low & 2) << 11) | ((low & 4) << 18) | ((low & 8) << 25);
  const uint second = ((high & 1) << 4) | ((high & 2) << 11) | ((high & 4) << 18) | ((high & 8) << 25);
  return bytes_(half_(b.u16(0)), -half_(b.u16(2)), (codes & 0x0F0F0F0Fu) | first, ((codes >> 4) & 0x0F0F0F0Fu) | second,
                0.0f);
""",
    "Q8_0": r"""
  return bytes_(half_(b.u16(0)), 0.0f, b.u32(2 + 8 * g) ^ 0x80808080u, b.u32(6 + 8 * g) ^ 0x80808080u, 128.0f);
""",
    "Q4_K": _K_SCALES
    + r"""
  const uint at = 16 + 32 * (r >> 1) + 8 * (g & 3), shift = 4 * (r & 1);
  return bytes_(scale, least, (b.u32(at) >> shift) & 0x0F0F0F0Fu, (b.u32(at + 4) >> shift) & 0x0F0F0F0Fu, 0.0f);
""",
    "Q5_K": _K_SCALES
    + r"""
  const uint l = 8 * (g & 3), at = 48 + 32 * (r >> 1) + l, shift = 4 * (r & 1);
  const uint low = ((b.u32(16 + l) >> r) & 0x01010101u) << 4, high = ((b.u32(20 + l) >> r) & 0x01010101u) << 4;
  return bytes_(scale, least, ((b.u32(at) >> shift) & 0x0F0F0F0Fu) | low,
                ((b.u32(at + 4) >> shift) & 0x0F0F0F0Fu) | high, 0.0f);
""",
    "Q6_K": r"""
  const uint h = g >> 4, r = (g >> 2) & 3, l = 8 * (g & 3);
  const uint at = 64 * h + 32 * (r & 1) + l, shift = 4 * (r >> 1);
  const uint low = ((b.u32(128 + 32 * h + l) >> (2 * r)) & 0x03030303u) << 4;
  const uint high = ((b.u32(132 + 32 * h + l) >> (2 * r)) & 0x03030303u) << 4;
  const float scale = half_(b.u16(208)) * float(int(b.u8(192 + (g >> 1)) ^ 128u) - 128);
  return bytes_(scale, 0.0f, ((b.u32(at) >> shift) & 0x0F0F0F0Fu) | low,
                ((b.u32(at + 4) >> shift) & 0x0F0F0F0Fu) | high, 32.0f);
""",
    "IQ4_NL": r"""
  return nibbles_(half_(b.u16(0)), b.u32(2 + 4 * g), table);
""",
    "IQ4_XS": r"""
  const uint r = g >> 2;
  const uint low = (b.u8(4 + (r >> 1)) >> (4 * (r & 1))) & 15, high = (b.u16(2) >> (2 * r)) & 3;
  return nibbles_(half_(b.u16(0)) * float(int(low + 16 * high) - 32), b.u32(8 + 4 * g), table);
""",
    "IQ2_XXS": r"""
  const uint at = 2 + 8 * (g >> 2), q = g & 3, word = b.u32(at + 4);
  const float scale = half_(b.u16(0)) * (float(word >> 28) + 0.5f) * 0.25f;
  const uint4 w = table[b.u8(at + q)];
  return signed_(scale, w.x, w.y, w.z, w.w, spread7_((word >> (7 * q)) & 127));
""",
    "IQ2_XS": r"""
  const uint word = b.u16(2 + 2 * g), s = (b.u8(66 + (g >> 2)) >> (4 * ((g >> 1) & 1))) & 15;
  const float scale = half_(b.u16(0)) * (float(s) + 0.5f) * 0.25f;
  const uint4 w = table[word & 511];
  return signed_(scale, w.x, w.y, w.z, w.w, spread7_(word >> 9));
""",
    "IQ2_S": r"""
  const uint index = b.u8(2 + g) | (((b.u8(66 + (g >> 2)) >> (2 * (g & 3))) & 3) << 8);
  const uint s = (b.u8(74 + (g >> 2)) >> (4 * ((g >> 1) & 1))) & 15;
  const float scale = half_(b.u16(0)) * (float(s) + 0.5f) * 0.25f;
  const uint4 w = table[index];
  return signed_(scale, w.x, w.y, w.z, w.w, spread_(b.u8(34 + g)));
""",
    "IQ3_XXS": r"""
  const uint word = b.u32(66 + 4 * (g >> 2));
  const float scale = half_(b.u16(0)) * (float(word >> 28) + 0.5f) * 0.5f;
  const uint2 v = table[b.u8(2 + 2 * g)], w = table[b.u8(3 + 2 * g)];
  return signed_(scale, v.x, v.y, w.x, w.y, spread7_((word >> (7 * (g & 3))) & 127));
""",
    "IQ3_S": r"""
  const uint high = b.u8(66 + (g >> 2)) >> (2 * (g & 3));
  const uint first = b.u8(2 + 2 * g) | ((high & 1) << 8), second = b.u8(3 + 2 * g) | (((high >> 1) & 1) << 8);
  const uint s = (b.u8(106 + (g >> 3)) >> (4 * ((g >> 2) & 1))) & 15;
  const uint2 v = table[first], w = table[second];
  return signed_(half_(b.u16(0)) * float(2 * s + 1), v.x, v.y, w.x, w.y, spread_(b.u8(74 + g)));
""",
    "IQ1_S": r"""
  const uint word = b.u16(34 + 2 * (g >> 2));
  const uint2 w = table[b.u8(2 + g) | (((word >> (3 * (g & 3))) & 7) << 8)];
  const float scale = half_(b.u16(0)) * float(2 * ((word >> 12) & 7) + 1);
  return ternary_(scale, w.x, w.y, (word >> 15) ? -0.125f : 0.125f);
""",
    "IQ1_M": r"""
  const uint nibble = (b.u8(32 + (g >> 1)) >> (4 * (g & 1))) & 15;
  const uint2 w = table[b.u8(g) | ((nibble & 7) << 8)];
  uint d = 0;
  for (uint k = 0; k < 4; ++k) d |= (b.u16(48 + 2 * k) >> 12) << (4 * k);
  const uint s = (b.u16(48 + 2 * (g >> 3)) >> (3 * ((g >> 1) & 3))) & 7;
  return ternary_(half_(d) * float(2 * s + 1), w.x, w.y, (nibble >> 3) ? -0.125f : 0.125f);
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
_NIBBLES = ("IQ4_NL", "IQ4_XS", "Q5_1")
_WITH_LEAST = ("Q4_K", "Q5_K", "Q5_1")


def has_decoder(format: BlockFormat) -> bool:
    """Whether kernels can read this format."""
    return format.name in _DECODERS


def alignment(format: BlockFormat) -> int:
    """What the address of a row must be a multiple of, in bytes: 2 or 4."""
    return math.gcd(_unit_bytes(format), 4)


def decoder_header(**roles: BlockFormat) -> str:
    """The header text of a kernel that reads these formats; each type's text once.

    For every role: ``decode_<role>(row, group)`` with a pointer to the row's first byte, ``first_<role>(group)`` and
    ``second_<role>(group)``, ``HAS_LEAST_<role>``, 0 where ``least`` is always 0, and ``scaled_<role>(q, scale)``. For
    formats whose scales lie apart also ``tile_`` and ``scale_at_``, which say where a group's scale is.
    """
    formats = {format.name: format for format in roles.values()}
    decoders = "".join(map(_function, formats.values()))
    used = decoders + "".join(text for name, text in _HELPERS.items() if name + "(" in decoders)
    helpers = [text for name, text in _HELPERS.items() if name + "(" in used]
    helpers += [_TILES.replace("TILE", str(tile)) for tile in {format.tile for format in formats.values()} - {0}]
    return "".join([_ACCESS, *helpers, decoders, *(_macros(role, format) for role, format in roles.items())])


def table_names(*formats: BlockFormat) -> list[str]:
    """Names of the inputs that hold these formats' codebooks, each once."""
    return list(dict.fromkeys(f"table_{_TABLES[format.name]}" for format in formats if format.name in _TABLES))


def table_arrays(*formats: BlockFormat) -> list[mx.array]:
    """What goes in for ``table_names``: uint32 [entries, words], the same arrays at every call."""
    return [_table(name) for name in _table_kinds(formats)]


def table_staging(*formats: BlockFormat) -> str:
    """The beginning of a body: all ``THREADS`` threads copy the codebooks to threadgroup memory, then wait."""
    lines = []
    for name in _table_kinds(formats):
        entries, words = _table(name).shape
        kind = f"uint{words}" if words > 1 else "uint"
        lines.append(f"  SHARED {kind} staged_{name}[{entries}];\n")
        lines.append(f"  for (uint i = tid.x; i < {entries}; i += THREADS) ")
        lines.append(f"staged_{name}[i] = CAST({kind}, table_{name})[i];\n")
    return "".join(lines) + ("  BARRIER();\n" if lines else "")


def _table_kinds(formats: tuple[BlockFormat, ...]) -> list[str]:
    return list(dict.fromkeys(_TABLES[format.name] for format in formats if format.name in _TABLES))


@cache
def _table(name: str) -> mx.array:
    if name == "IQ4":  # a byte of two codes -> two halves
        values = np.array(IQ4_VALUES, dtype=np.float16)
        packed = np.stack([np.tile(values, 16), np.repeat(values, 16)], axis=-1)
    elif name == "IQ1_S":  # bytes, one more than the values -1, 0 and 1
        packed = grid_array(name) + np.int8(1)
    else:
        packed = grid_array(name).astype(np.float16)
    return mx.array(np.ascontiguousarray(packed).view(np.uint32))


def _unit(format: BlockFormat) -> int:
    """Weights per block; formats of single weights count as blocks of a group."""
    return max(format.block_weights, GROUP)


def _unit_bytes(format: BlockFormat) -> int:
    return format.row_bytes(_unit(format))


def _function(format: BlockFormat) -> str:
    """One decoder as a function of the row."""
    table, groups = format.name in _TABLES, _unit(format) // GROUP
    return (
        f"template <typename P{', typename G' if table else ''}> "
        f"FN Group decode_{format.name}_(P row, uint group{', G table' if table else ''}) {{\n"
        f"  const auto b = block_of<{_unit_bytes(format)}, {alignment(format)}>(row, group / {groups});\n"
        f"  const uint g = group % {groups};{_DECODERS[format.name]}}}\n"
    )


def _macros(role: str, format: BlockFormat) -> str:
    table = f", staged_{_TABLES[format.name]}" if format.name in _TABLES else ""
    first, apart = ("(32 * ((group) / 4) + 4 * ((group) % 4))", 16) if format.name in _NIBBLES else ("(8 * (group))", 4)
    return (
        f"#define decode_{role}(row, group) decode_{format.name}_(row, group{table})\n"
        f"#define first_{role}(group) {first}\n"
        f"#define second_{role}(group) ({first} + {apart})\n"
        f"#define HAS_LEAST_{role} {int(format.name in _WITH_LEAST)}\n"
        f"#define scaled_{role}(q, scale) {'scaled_(q, scale)' if format.tile else 'q'}\n"
    )
