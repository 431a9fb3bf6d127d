"""Who may import whom: the architecture, checked."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORMATS = "ggml_blocks"  # what bytes mean, for every op that reads packed blocks; not an op
OPS = sorted(p.name for p in (ROOT / "custom_kernels").iterdir() if (p / "__init__.py").exists() and p.name != FORMATS)
# module prefix: what of the project it may import
ALLOWED = {
    "custom_kernels": ("custom_kernels",),
    "mlx_moe.config": (),
    "mlx_moe.cache": ("custom_kernels",),
    "mlx_moe.models": ("mlx_moe.config", "mlx_moe.cache", "mlx_moe.models", "custom_kernels"),
    "mlx_moe.paging": ("mlx_moe.config", "mlx_moe.models.layers", "mlx_moe.paging", "custom_kernels"),
}


def _files() -> dict[str, Path]:
    files = [*(ROOT / "mlx_moe").rglob("*.py"), *(ROOT / "custom_kernels").rglob("*.py")]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in files}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("module", sorted(_files()))
def test_layers(module):
    own = {
        name for name in _imports(_files()[module]) if name.split(".")[0] in ("mlx_moe", "custom_kernels", "scripts")
    }
    for prefix, allowed in ALLOWED.items():
        if _within(module, prefix):
            wrong = {name for name in own if not any(_within(name, ok) for ok in allowed)}
            assert not wrong, f"{module} may not import {wrong}"
    if not _within(module, "mlx_moe.cli") and module != "mlx_moe.__main__":
        assert not any(_within(name, "mlx_moe.cli") or _within(name, "scripts") for name in own), module
    if _within(module, "mlx_moe.models"):
        assert not any(name.split(".")[0] in ("os", "io", "pathlib") for name in _imports(_files()[module])), module


def test_one_op_never_imports_another():
    for module, path in _files().items():
        for op in OPS:
            if _within(module, f"custom_kernels.{op}"):
                others = [n for n in _imports(path) for o in OPS if o != op and _within(n, f"custom_kernels.{o}")]
                assert not others, f"{module} imports {others}"


def test_one_module_touches_the_environment():
    for module, path in _files().items():
        text = path.read_text()
        touches = "os.environ" in text or "getenv" in text
        assert touches == (module == "mlx_moe.environment"), f"{module} touches the environment"


@pytest.mark.parametrize("name", ["MLX_ENABLE_TF32", "MLX_CUDA_USE_CUDNN_SDPA"])
@pytest.mark.parametrize(("given", "kept"), [(None, "0"), ("1", "1"), ("0", "0")])
def test_settings_of_mlx_that_exactness_needs(name, given, kept):
    """They are off unless the user says otherwise; MLX has both on by default on some GPUs."""
    environment = {key: value for key, value in os.environ.items() if key != name}
    environment |= {} if given is None else {name: given}
    code = f"import mlx_moe, os; print(os.environ[{name!r}])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == kept


def test_importing_and_help_are_light():
    """``import mlx_moe`` and the command's help load neither MLX nor transformers."""
    code = "import sys, mlx_moe; from mlx_moe.cli import main; main(['--help']); "
    code += "assert not {'mlx.core', 'transformers', 'mlx_lm', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)
