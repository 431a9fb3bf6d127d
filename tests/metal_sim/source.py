"""The text that MLX would hand to Apple's compiler, and its translation to C++.

The text comes from MLX itself: a traced `mx.fast.metal_kernel` call carries it as an argument of the CustomKernel
primitive, on any machine. The translation changes as little as it can, and no line number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from .errors import MetalError

MLX_INCLUDE = Path(mx.__file__).parent / "include"

# A declaration that begins with an address space and declares no pointer: `threadgroup float s[32], t;`
_THREADGROUP_VARIABLE = re.compile(
    r"(^|[;{}])(\s*)threadgroup(\s+[\w:<>, ]+?[\w>]\s+\w+\s*(?:\[[^;=]*\])*\s*(?:,\s*\w+\s*(?:\[[^;=]*\])*\s*)*;)", re.M
)
_SPACE_MACRO = re.compile(
    r"^[ \t]*#define[ \t]+(\w+)[ \t]+((?:(?:device|constant|threadgroup|thread|const)\b[ \t]*)+)$", re.M
)
_FLOAT_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])")
_INSTANTIATION = re.compile(r"\ntemplate \[\[host_name.*?decltype\((.*?)\)\s.*?\n", re.S)
_PARAMETER = re.compile(r"(?P<type>.*)(?P<mark>[*&]) (?P<name>\w+) \[\[buffer\((?P<index>\d+)\)\]\]", re.S)


@dataclass(frozen=True)
class Trace:
    """One call of a kernel as MLX would launch it."""

    name: str
    text: str  # as sent to Apple's compiler, less the header that MLX puts before every kernel
    shape_infos: list[tuple[bool, bool, bool]]  # per input: does the kernel take its shape, strides, ndim
    row_contiguous: bool  # does MLX copy inputs that are not

    @property
    def header(self) -> str:
        """The text before the kernel function: helpers, tables, macros."""
        before = self.text[: _kernel_start(self.text)]
        return before.rsplit("template <", 1)[0] if before.rstrip().endswith(">") else before

    def line(self, number: int) -> str:
        """One line of the text, as the end of an error message."""
        lines = self.text.splitlines()
        return f": {lines[number - 1].strip()}" if 0 < number <= len(lines) else ""


def _kernel_start(text: str) -> int:
    start = text.find("[[kernel]] void custom_kernel_")
    if start < 0:
        raise MetalError("the text has no [[kernel]] function as MLX writes it")
    return start


def trace(kernel: Callable[..., Any], inputs: Sequence[mx.array], **launch: Any) -> Trace:
    """Trace `kernel(inputs=inputs, **launch)`; nothing runs."""
    found: list[list[Any]] = []

    def record(event: dict[str, Any]) -> None:
        if event["type"] == "primitive" and event["name"] == "CustomKernel":
            found.append(event["arguments"])

    mx.export_function(record, lambda *arrays: kernel(inputs=list(arrays), **launch), *inputs)
    if len(found) != 1:
        raise MetalError(f"the call made {len(found)} kernels where one was expected")
    arguments = found[0]
    return Trace(name=arguments[0], text=arguments[1], shape_infos=arguments[8], row_contiguous=arguments[9])


def expand_space_macros(text: str) -> str:
    """Expand macros that only rename an address space, such as `#define SHARED threadgroup`."""
    for name, spaces in _SPACE_MACRO.findall(text):
        text = re.sub(rf"(?<!#define )\b{name}\b", spaces.strip(), text)
    return text


@lru_cache
def _mlx_prelude() -> str:
    """The header that MLX puts before every kernel on a Mac, in the one spot where clang needs it changed."""
    utils = (MLX_INCLUDE / "mlx/backend/metal/kernels/utils.h").read_text()
    # An array parameter may not carry an address space in clang; it is a pointer in any case.
    return re.sub(r"(constant const int64_t) (\w+)\[\d\]", r"\1* \2", utils)


def _arguments(text: str) -> tuple[list[str], list[str]]:
    """(C++ expressions for the kernel's parameters, names of its buffers in order)."""
    start = _kernel_start(text)
    head = text[start : text.index(") {\n", start)]
    expressions, names = [], []
    for parameter in head[head.index("(") + 1 :].split(",\n"):
        if m := _PARAMETER.match(parameter.strip()):
            pointer = f"({m['type']}*)(uintptr_t)buffers[{m['index']}]"
            expressions.append(pointer if m["mark"] == "*" else f"*{pointer}")
            names.append(m["name"])
        else:
            attribute = re.search(r"\[\[(\w+)\]\]", parameter)
            if attribute is None:
                raise MetalError(f"kernel parameter without an attribute: {parameter.strip()}")
            expressions.append(f"ids.{attribute[1]}")
    return expressions, names


@lru_cache(maxsize=32)
def translate(text: str) -> tuple[str, list[str]]:
    """Metal text -> (C++ text, names of the kernel's buffers). Kept, since each schedule asks again."""
    text = expand_space_macros(text)
    text = _FLOAT_LITERAL.sub(r"\1f", text)  # a literal without suffix is a float in Metal
    instantiation = _INSTANTIATION.search(text)
    if instantiation:
        function = instantiation[1]
        text = text[: instantiation.start()] + "\n"
    else:
        function = re.search(r"\[\[kernel\]\] void (\w+)", text)[1]
    text = _THREADGROUP_VARIABLE.sub(r"\1\2MSL_THREADGROUP_VARIABLE threadgroup\3", text)
    expressions, names = _arguments(text)
    entry = f"{{ {function}({', '.join(expressions)}); }}"
    return (
        # The 3 marks system text, where clang keeps its warnings to itself. What the standard headers need and Metal
        # does not have is poisoned after them.
        f'# 1 "mlx/utils.h" 3\n{_mlx_prelude()}\n'
        '# 1 "poison" 3\n#pragma clang poison double printf malloc free setjmp\n'
        f'# 1 "kernel.metal"\n{text}\n'
        f'# 1 "entry" 3\nextern "C" void msl_entry(void** buffers, const msl_ids& ids) {entry}\n'
    ), names
