"""Compiles translated kernels with the clang inside pip's ziglang and keeps the results.

The cache is a folder of the user's under the system's temporary folder, never in a checkout. A library's name is a
hash of all that makes it: its text, the headers, the runtime, the flags, the compiler. Processes may share it:
each builds under a name of its own and renames.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from .errors import MetalError
from .source import MLX_INCLUDE

_HERE = Path(__file__).resolve().parent
_TARGETS = {
    # half and bfloat conversions are instructions from x86-64-v3 on
    "x86_64": ["-target", "x86_64-linux-gnu", "-mcpu=x86_64_v3"],
    "aarch64": ["-target", "aarch64-linux-gnu", "-mcpu=baseline"],
}
_KEEP_S = 14 * 86400  # libraries that no run has used for this long are removed

_COMMON = [
    *("-x", "c++", "-std=c++14", "-fPIC", "-O2", "-fno-exceptions", "-fno-rtti", "-fno-math-errno"),
    *("-Wno-unknown-attributes", "-Wno-ignored-attributes", "-Wno-c++11-narrowing", "-Wno-psabi"),
    "-g0",  # zig would add what debuggers read; lines in messages come from elsewhere
]
_KERNEL = [
    # Round every half and bfloat operation, as the chip does
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    # Uninitialised variables hold a pattern (NaN for floats), not what the last call left on the stack
    "-ftrivial-auto-var-init=pattern",
    # Undefined arithmetic and local arrays: the handlers are in runtime/faults.h
    "-fsanitize=bounds,shift-exponent,integer-divide-by-zero,alignment",
    "-fno-sanitize-recover=all",
    # What Apple's compiler refuses and clang only warns of
    *("-Werror=return-type", "-Werror=uninitialized", "-Werror=sometimes-uninitialized", "-Werror=array-bounds"),
    *("-Werror=shift-count-overflow", "-Werror=vla", "-Werror=c++17-extensions", "-Wimplicit-float-conversion"),
    *("-fno-caret-diagnostics", "-fdiagnostics-color=never"),
]


@lru_cache
def why_not() -> str | None:
    """Why kernels cannot be simulated here, in one line; None where they can."""
    if not sys.platform.startswith("linux"):
        return f"the Metal simulator runs on Linux, not on {platform.system()}"
    if platform.machine() not in _TARGETS:
        return f"the Metal simulator runs on {' and '.join(_TARGETS)}, not on {platform.machine()}"
    if platform.machine() == "x86_64" and not re.search(r"^flags.*\bavx2\b", Path("/proc/cpuinfo").read_text(), re.M):
        return "the Metal simulator needs a CPU with AVX2"
    if importlib.util.find_spec("ziglang") is None:
        return "the Metal simulator compiles with ziglang, which is not installed (pip install ziglang)"
    try:
        done = subprocess.run([_zig_binary(), "version"], capture_output=True, text=True)
    except OSError as error:
        return f"the Metal simulator's compiler, ziglang, does not start: {error}"
    return f"ziglang does not run: {done.stderr.strip()[:200]}" if done.returncode else None


def build(cpp: str, contract: bool = False) -> Path:
    """Compile and link a translated kernel; returns its shared library, from the cache where it is there."""
    flags = [*_COMMON, *_KERNEL, f"-ffp-contract={'fast' if contract else 'off'}"]
    library = cache_folder() / f"{_digest(cpp, *flags)}.so"
    if library.exists():
        os.utime(library)  # counts as used
        return library
    runtime = _runtime()
    with tempfile.TemporaryDirectory(dir=cache_folder()) as work:
        source, spaced, flat, linked = (Path(work, name) for name in ("kernel.cpp", "spaced.o", "flat.o", "kernel.so"))
        source.write_text(cpp)
        # -c always: anything else ends in a link, for which zig first builds libc++ from its source.
        compiling = ["c++", *_target(), *flags, *_includes(), "-c", str(source), "-o"]
        # What runs is compiled without address spaces, because clang checks alignment in the default one alone.
        # Both at once, for there are hundreds of kernels; clang finds what it finds without optimising, too.
        with ThreadPoolExecutor(1) as beside:
            checking = beside.submit(_zig, work, *compiling, str(spaced), "-O0")
            flattened = _zig(work, *compiling, str(flat), "-DMSL_FLAT")
            checked = checking.result()
        if errors := _errors(checked):
            raise MetalError(errors)
        if flattened.returncode and checked.returncode:
            raise MetalError(_errors(flattened) or flattened.stderr.strip())
        if flattened.returncode:
            # Helpers that differ only in the space of their arguments stop that; then alignment goes unchecked.
            _zig(work, *compiling, str(spaced)).check_returncode()
        kernel = spaced if flattened.returncode else flat
        # The linker by itself, for the same reason; kernels need no libc++.
        linking = _zig(work, "ld.lld", "-shared", str(kernel), str(runtime), "-o", str(linked))
        if linking.returncode:
            raise MetalError(f"the kernel does not link: {linking.stderr.strip()}")
        linked.replace(library)
    return library


def _errors(done: subprocess.CompletedProcess[str]) -> str:
    """What clang finds wrong, one finding a line.

    Clang has an implicit constructor or assignment in the default address space alone, Metal in each: an error that
    only rules out implicit ones says nothing. Metal converts float to half silently, but never to bfloat.
    """
    findings: list[list[str]] = []  # each an error or warning with its notes
    for line in done.stderr.splitlines():
        if re.search(r": (?:fatal )?(?:error|warning): ", line):
            findings.append([line])
        elif ": note: " in line and findings:
            findings[-1].append(line)
    bad = []
    for first, *notes in findings:
        if "error: " in first:
            if not (notes and all("(the implicit " in note for note in notes)):
                bad.append(first)
        elif "implicit-float-conversion" in first and "'__bf16'" in first.split(" to ")[-1]:
            bad.append(first)
    if done.returncode and not findings:
        bad.append(done.stderr.strip() or "clang failed")
    return "\n".join(dict.fromkeys(bad))


def _runtime() -> Path:
    """The scheduler as an object file, compiled once."""
    built = cache_folder() / f"{_digest(*_COMMON)}.o"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as work:
            made = compile_runtime(platform.machine(), Path(work, "runtime.o"))
            made.replace(built)
    os.utime(built)
    return built


def compile_runtime(machine: str, to: Path) -> Path:
    """Compile the scheduler for a machine ("x86_64" or "aarch64") into the object file `to`, in a folder for work."""
    source = _HERE / "runtime" / "fibers.cpp"
    flags = [*_TARGETS[machine], *_COMMON, "-Wno-c++17-extensions"]
    done = _zig(str(to.parent), "c++", *flags, "-c", str(source), "-o", str(to))
    if done.returncode:
        raise RuntimeError(f"the simulator's runtime does not compile: {done.stderr}")
    return to


@lru_cache
def cache_folder() -> Path:
    """A folder that only this user can write; removes what has not been used for long."""
    folder = Path(tempfile.gettempdir()) / f"metal-sim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to somebody else")
    folder.chmod(0o700)
    for old in folder.glob("*.[so]*"):
        try:
            if time.time() - old.stat().st_mtime > _KEEP_S:
                old.unlink()
        except FileNotFoundError:  # another process was first
            continue
    return folder


@lru_cache
def _zig_binary() -> str:
    return str(Path(importlib.util.find_spec("ziglang").origin).with_name("zig"))


def _zig(work: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run zig, with its own caches inside the folder `work`: ours is enough."""
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": work, "ZIG_LOCAL_CACHE_DIR": work}
    return subprocess.run([_zig_binary(), *arguments], capture_output=True, text=True, env=environment, timeout=300)


def _target() -> list[str]:
    return _TARGETS[platform.machine()]


def _includes() -> list[str]:
    return [f"-isystem{_HERE / 'include'}", f"-isystem{MLX_INCLUDE}"]


def _digest(*parts: str) -> str:
    h = hashlib.sha256(_constant_digest().encode())
    for part in parts:
        h.update(part.encode() + b"\0")
    return h.hexdigest()[:24]


@lru_cache
def _constant_digest() -> str:
    """A hash of what every build shares: compiler, target, MLX's version and this folder's C++ files."""
    versions = [importlib.metadata.version(package) for package in ("ziglang", "mlx")]
    h = hashlib.sha256("\0".join([*versions, *_target()]).encode())
    for folder in ("include", "runtime"):
        for file in sorted((_HERE / folder).rglob("*")):
            if file.is_file():
                h.update(file.read_bytes() + b"\0")
    return h.hexdigest()
