"""Builds the reader's library, ``mlx_moe/paging/_reads.so``; everything else stands in pyproject.toml.

It is plain C without Python's headers, loaded with ctypes, so one file serves every version of Python. The system's
compiler builds it, or that of the ziglang package where the system has none. Without it the package works, slower.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ZIG = "ziglang>=0.15.2,<0.18"
_TARGETS = {"darwin": "{}-macos.14.0", "linux": "{}-linux-gnu.2.17"}
_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}


@cache
def _has_compiler() -> bool:
    """Not only its name, as on a Mac without the developer tools."""
    cc = shutil.which("cc")
    return cc is not None and subprocess.run([cc, "--version"], capture_output=True).returncode == 0


def _compiler() -> list[str]:
    if _has_compiler():
        return ["cc"]
    machine = platform.machine().lower()
    target = _TARGETS[sys.platform].format(_MACHINES.get(machine, machine))
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


class BuildLibrary(build_ext):
    """Of one source; where that fails, setuptools says so and goes on."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without the version of Python in it."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        """Compile and link at once."""
        out = Path(self.get_ext_fullpath(ext.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        # Beside the old one first: a process may have that in use.
        new = out.with_suffix(".new")
        flags = ["-O2", "-std=c11", "-shared", "-fPIC", "-o", str(new), *ext.sources, "-lpthread"]
        try:
            subprocess.run([*_compiler(), *flags], check=True)
        except (OSError, KeyError, subprocess.CalledProcessError) as error:
            raise CompileError(f"the reader's library cannot be built: {error}") from None
        new.replace(out)


class Wheel(bdist_wheel):
    """For one platform, but every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """See bdist_wheel."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("mlx_moe.paging._reads", ["mlx_moe/paging/reads.c"], optional=True)],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
    setup_requires=[] if _has_compiler() else [ZIG],
)
