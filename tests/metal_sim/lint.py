"""Rules of the Metal language that clang's C++ does not know: address spaces everywhere, no recursion, no CUDA.

Text rules, so deliberately narrow: each is tested on wrong kernels and on kernels that run on Macs.
"""

from __future__ import annotations

import re
from functools import lru_cache

from .source import Trace, expand_space_macros

_SPACES = r"\b(?:device|constant|threadgroup|thread)\b"
_QUALIFIER = r"(?:device|constant|threadgroup|thread|const|volatile)"
_TYPE = (
    r"(?:float|half|bfloat|bfloat16_t|float16_t|u?int\d*_t|u?int|u?char|u?short|u?long|bool|T|U|InT|StT"
    r"|(?:float|half|bfloat|u?int|u?char|u?short|u?long)[234])"
)
_POINTER = re.compile(
    rf"(?P<pre>(?:\b{_QUALIFIER}\b\s*)*)\b{_TYPE}\s*(?P<post>{_QUALIFIER}?\s*)"
    r"[*&]\s*(?:const\s+)?[A-Za-z_]\w*\s*(?=[=;,)\[])"
)
_FORBIDDEN = [
    (re.compile(pattern), why)
    for pattern, why in (
        (r"\b(?:long\s+)?double\b", "double does not exist in Metal"),
        (r"\b\d+\.\d*(?:[eE][+-]?\d+)?[lL]\b", "long double literal"),
        (r"\bstd::", "there is no std:: in Metal"),
        (r"\bgoto\b", "goto"),
        (r"\b(?:new|delete)\b", "new and delete do not exist in Metal"),
        (r"\b(?:try|throw|catch)\b", "exceptions do not exist in Metal"),
        (r"\bvirtual\b", "virtual functions do not exist in Metal"),
        (r"\bthread_local\b", "thread_local does not exist in Metal"),
        (r"\b(?:dynamic_cast|typeid)\b", "run-time types do not exist in Metal"),
        (r"\b(?:__syncthreads|__syncwarp|__shfl\w*|__shared__|__device__|__global__)\b", "CUDA name"),
        (r"\b(?:threadIdx|blockIdx|blockDim|gridDim|atomicAdd|__ldg|__half|__nv_bfloat16)\b", "CUDA name"),
        (r"\[\s*[&=]?\s*\]\s*\(", "lambda (Metal 4 only)"),
        (r"\(\s*\*\s*\w+\s*\)\s*\(", "function pointer"),
        (r"\bprintf\b", "printf"),
        (r"\bassert\s*\(", "assert"),
    )
]
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.)*", re.S | re.M)
_FUNCTION = re.compile(r"\b(\w+)\s*\([^;{}()]*(?:\([^()]*\)[^;{}()]*)*\)\s*(?:const\s*)?\{")
_NOT_A_VARIABLE = re.compile(
    r"(?:using|typedef|struct|enum|template|namespace|static_assert|extern|class|union)\b|\[\["
)
_STATEMENTS = {"if", "for", "while", "switch", "return", "sizeof", "decltype"}

Finding = tuple[int, str]  # (line, what is wrong)


def lint(trace: Trace) -> list[str]:
    """What is wrong with a kernel's text, one message a line; empty where nothing is."""
    return [f"kernel.metal:{line}: lint: {why}{trace.line(line)}" for line, why in _findings(trace.text, trace.header)]


@lru_cache(maxsize=32)
def _findings(text: str, header: str) -> list[Finding]:
    """In order of lines; kept, since each schedule asks again."""
    text = _blank(_COMMENT, expand_space_macros(text))
    header = _blank(_DIRECTIVE, _blank(_COMMENT, expand_space_macros(header)))
    return sorted({*_pointers(text), *_names(text), *_globals(header), *_recursion(header)})


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """Overwrite matches with spaces, so that offsets and lines stay."""
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _pointers(text: str) -> list[Finding]:
    """Every pointer and reference names its address space."""
    found = []
    for m in _POINTER.finditer(text):
        before = text[: m.start()].rstrip()[-1:]
        is_declaration = before in ";{}(,<>"  # also at the start; anything else is a product such as `a * b`
        if is_declaration and not re.search(_SPACES, m["pre"] + m["post"]):
            found.append((_line(text, m.start()), f"pointer or reference without address space: {m.group().strip()!r}"))
    return found


def _names(text: str) -> list[Finding]:
    return [(_line(text, m.start()), why) for pattern, why in _FORBIDDEN for m in pattern.finditer(text)]


def _globals(header: str) -> list[Finding]:
    """Variables at program scope are in the constant address space."""
    found = []
    depth, start = 0, 0
    for i, c in enumerate(header):
        if c in "{(":
            depth += 1
        elif c in "})":
            depth -= 1
            if c == "}" and depth == 0 and "=" not in header[start:i].split("{")[0]:
                start = i + 1  # the end of a function or type, not of an initialiser
        elif c == ";" and depth == 0:
            statement = header[start:i].strip()
            head = re.split(r"[={]", statement)[0]
            is_variable = "(" not in head and re.search(r"\w\s+\w", head) and not _NOT_A_VARIABLE.match(statement)
            if is_variable and not re.search(r"\bconstant\b", head):
                line = _line(header, start + len(header[start:i]) - len(header[start:i].lstrip()))
                found.append((line, f"program-scope variable not in constant address space: {head.strip()!r}"))
            start = i + 1
    return found


def _recursion(header: str) -> list[Finding]:
    """No function reaches itself. Overloaded names are left out: one overload may well call another."""
    bodies: dict[str, list[tuple[int, str]]] = {}
    for m in _FUNCTION.finditer(header):
        if m[1] not in _STATEMENTS:
            bodies.setdefault(m[1], []).append((m.start(), _braced(header, m.end() - 1)))
    single = {name: found[0] for name, found in bodies.items() if len(found) == 1}
    calls = {
        name: {called for called in re.findall(r"(\w+)\s*\(", body) if called in single}
        for name, (_, body) in single.items()
    }

    def reaches(name: str, target: str, seen: set[str]) -> bool:
        fresh = calls[name] - seen
        return target in calls[name] or any(reaches(called, target, seen | fresh) for called in fresh)

    return [(_line(header, at), f"recursion: {name}") for name, (at, _) in single.items() if reaches(name, name, set())]


def _braced(text: str, start: int) -> str:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i]
    return text[start:]
