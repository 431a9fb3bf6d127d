"""Products on the decode path stand in a few listed functions, each of which gets one row of a window at a time.

MLX's matmul, quantized_matmul and attention choose their algorithm, and with it their rounding, by the number of rows;
so a product elsewhere would make a token's result depend on how many tokens share its pass. A static check finds
products outside the list; a run of a tiny model checks that the listed functions get the rows that the list says.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest

import checkpoints
from gguf_models import q8_0_matrices, write_gguf
from mlx_moe.runtime import load_model, quantize_model

ROOT = Path(__file__).resolve().parent.parent
STARTS = ("mlx_moe.models", "mlx_moe.paging.resident", "mlx_moe.paging.experts", "mlx_moe.paging.rows")
"""The decode path is these and whatever of the project they import."""
OFF_PATH = ("custom_kernels.ggml_blocks.quantize",)
"""What they import and never run in a pass."""

PRODUCT = re.compile(
    r"\w*mm|\w*matmul|einsum|tensordot|inner|outer|vecdot|linalg|conv\w*|\w*attention|gated_delta_update"
    r"|\w*Linear|Bilinear|Conv\w*|MultiHeadAttention|Transformer\w*|RNN|GRU|LSTM"
)
"""Names of MLX and mlx-lm that multiply matrices or convolve."""
OPERATORS = re.compile(r"__[ri]?matmul__")


@dataclass(frozen=True)
class Entry:
    """A function that may multiply matrices, and why."""

    module: str
    name: str  # within the module
    why: str
    rows: Callable[..., int] | None = None  # of a call, from its arguments without self; None: never run for windows
    alone: bool = False  # gets whole windows and multiplies each row by itself; tests/kernels shows that bits are equal


ENTRIES = (
    Entry(
        "mlx_moe.models.layers",
        "Linear._product",
        "Linear goes through by_rows",
        lambda x: x.shape[1],
    ),
    Entry(
        "mlx_moe.models.layers",
        "ExpertLinear._gathered",
        "ExpertLinear loops over the first axis",
        lambda x, ids, *_: len(ids),
    ),
    Entry(
        "mlx_moe.models.layers",
        "gather_mm",
        "_gathered for plain weights",
        lambda x, weights, ids, *_: len(ids),
    ),
    Entry(
        "mlx_moe.models.qwen4_exp.attention",
        "SparseAttention._attend",
        "_dense loops over the queries of a window, _sparse has tiles of one",
        lambda q, *_: q.shape[0] * q.shape[2],
    ),
    Entry(
        "mlx_moe.models.qwen4_exp.indexer",
        "Indexer._scores",
        "called for each tile of _sparse_row, and for each sequence of a step",
        lambda q, *_: q.shape[1],
    ),
    *(
        Entry("custom_kernels.dequant_gemv.reference", name, "a loop over the rows of x", alone=True)
        for name in ("naive_block_gemv", "naive_expert_gate_up", "naive_expert_down")
    ),
    Entry("custom_kernels.gdn_step.rule", "chunked_delta_rule", "prompts only"),
    Entry("custom_kernels.gdn_step.rule", "_unit_lower_inverse", "prompts only"),
)


@dataclass(frozen=True)
class Product:
    """Where a product stands in a source text."""

    line: int
    function: str  # dotted names of the classes and functions around it, "" at module level
    what: str


class _Finder(ast.NodeVisitor):
    """Collects every use of a product, called or not."""

    def __init__(self) -> None:
        self.found: list[Product] = []
        self._around: list[str] = []
        self._libraries = {"operator"}  # names bound to modules of MLX or mlx-lm, and to operator

    def _add(self, node: ast.AST, what: str) -> None:
        self.found.append(Product(node.lineno, ".".join(self._around), what))

    def _scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._around.append(node.name)
        self.generic_visit(node)
        self._around.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _scope

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if _is_library(alias.name):
                self._libraries.add(alias.asname or alias.name.split(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names if _is_library(node.module or "") else ():
            self._libraries.add(alias.asname or alias.name)
            if alias.name == "*" or PRODUCT.fullmatch(alias.name):
                self._add(node, f"from {node.module} import {alias.name}")

    def visit_Assign(self, node: ast.Assign) -> None:
        if self._of_library(node.value):
            self._libraries |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp | ast.AugAssign) -> None:
        if isinstance(node.op, ast.MatMult):
            self._add(node, "@")
        self.generic_visit(node)

    visit_AugAssign = visit_BinOp

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if OPERATORS.fullmatch(node.attr) or (PRODUCT.fullmatch(node.attr) and self._of_library(node.value)):
            self._add(node, ast.unparse(node))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and self._of_library(node.args[0]):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if PRODUCT.fullmatch(name):
                self._add(node, ast.unparse(node))
        self.generic_visit(node)

    def _of_library(self, node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._libraries


def _is_library(module: str) -> bool:
    return module.split(".")[0] in ("mlx", "mlx_lm", "operator")


def products(source: str) -> list[Product]:
    """Every product in a source text."""
    finder = _Finder()
    finder.visit(ast.parse(source))
    return finder.found


def _path_of(module: str) -> Path | None:
    stem = ROOT.joinpath(*module.split("."))
    return next((p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.exists()), None)


def _imports(path: Path) -> Iterator[str]:
    """Names that may be modules: of ``from a import b`` both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@functools.cache
def decode_path() -> dict[str, Path]:
    """Module -> file of everything that a window may run through."""
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / "mlx_moe").rglob("*.py")}
    todo = [name for name in files if name.startswith(STARTS)]
    found: dict[str, Path] = {}
    while todo:
        module = todo.pop()
        path = _path_of(module)
        ours = module.split(".")[0] in ("mlx_moe", "custom_kernels") and not module.startswith(OFF_PATH)
        if module not in found and path is not None and ours:
            found[module] = path
            todo += _imports(path)
    return found


def unlisted(module: str, source: str) -> list[Product]:
    """Products of a module outside the listed functions."""
    listed = {entry.name for entry in ENTRIES if entry.module == module}
    return [product for product in products(source) if product.function not in listed]


@pytest.mark.parametrize("module", sorted(decode_path()))
def test_no_product_outside_the_list(module):
    found = unlisted(module, decode_path()[module].read_text())
    assert not found, f"{module}: {found}: products of a window go through the entries of models/layers.py"


def test_the_path_has_the_model_and_the_ops_that_it_uses():
    ops = {"custom_kernels.gdn_step.reference", "custom_kernels.gdn_step.rule", "custom_kernels.moce_route.reference"}
    ops |= {"custom_kernels.dequant_gemv.reference", "custom_kernels.ggml_blocks.reference"}
    assert ops | {"mlx_moe.models.qwen4_exp.ple", "mlx_moe.cache", "custom_kernels.causal_conv"} <= decode_path().keys()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_no_entry_is_stale(entry):
    """Each still exists on the decode path and still has a product."""
    source = decode_path()[entry.module].read_text()
    assert entry.name in {product.function for product in products(source)}, f"{entry.name} multiplies nothing"


PLANTED = {
    "y = x @ w": "@",
    "x @= w": "@",
    "import mlx.core as mx\ndef f(x):\n  return mx.matmul(x, x)": "mx.matmul",
    "import mlx.core\nmlx.core.addmm(c, x, w)": "mlx.core.addmm",
    "from mlx import core\ncore.quantized_matmul(x)": "core.quantized_matmul",
    "import mlx.core as mx\nrun = partial(mx.gather_qmm, transpose=True)": "mx.gather_qmm",
    "import mlx.core as mx\nmx.gather_mm(x, w)": "mx.gather_mm",
    "import mlx.core as mx\nfast = mx.fast\nfast.scaled_dot_product_attention(q)": "fast.scaled_dot_product_attention",
    "from mlx.core import fast\nfast.scaled_dot_product_attention(q)": "fast.scaled_dot_product_attention",
    "from mlx.core import einsum as e": "from mlx.core import einsum",
    "from mlx.core import *": "from mlx.core import *",
    "import mlx.core as mx\nmx.tensordot(x, w), mx.inner, mx.outer, mx.vecdot": "mx.tensordot",
    "import mlx.core as mx\nclass A:\n  def f(self, x):\n    return mx.conv1d(x)": "mx.conv1d",
    "import mlx.core as mx\ngetattr(mx, 'matmul')(x, w)": "getattr(mx, 'matmul')",
    "import mlx.nn as nn\nlayer = nn.Linear(2, 3)": "nn.Linear",
    "import mlx.nn as nn\nlayer = nn.QuantizedLinear(2, 3)": "nn.QuantizedLinear",
    "from mlx_lm.models.base import scaled_dot_product_attention": "from mlx_lm.models.base import",
    "import operator\nreduce(operator.matmul, xs)": "operator.matmul",
    "y = x.__matmul__(w)": "x.__matmul__",
}


@pytest.mark.parametrize("source", PLANTED)
def test_planted_products_are_found(source):
    found = unlisted("mlx_moe.models.layers", source)
    assert found and found[0].what.startswith(PLANTED[source])


def test_a_listed_name_counts_in_its_own_module_only():
    source = "class Linear:\n  def _product(self, x):\n    return x @ x\n  def __call__(self, x):\n    return x @ x"
    assert [product.line for product in unlisted("mlx_moe.models.layers", source)] == [5]
    assert [product.line for product in unlisted("mlx_moe.cache", source)] == [3, 5]


def test_what_is_no_product():
    source = (
        "import mlx.core as mx\nimport mlx.nn as nn\nfrom mlx_moe.models.layers import Linear\n"
        "y = Linear(2, 3)(x) * self.conv1d.weight + nn.silu(mx.fast.rms_norm(x)) + self.outer\n"
    )
    assert products(source) == []


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Rows of every call of an entry in windows of 5 tokens, dense and sparse, with weights of all three kinds."""
    raw = checkpoints.tiny_config(num_experts=9)
    weights = checkpoints.random_weights(raw, 3, mtp=True)
    folder = checkpoints.write(tmp_path_factory.mktemp("m"), raw, weights)
    plain, packed = (load_model(folder, dtype=mx.float32)[0] for _ in range(2))
    quantize_model(packed, group_size=32)
    blocks = load_model(write_gguf(folder / "m.gguf", raw, weights, mtp=True, formats=q8_0_matrices), mx.float32)[0]
    ids = mx.array(checkpoints.tokens(50)[None])
    seen: dict[str, list[int]] = {entry.name: [] for entry in ENTRIES}
    for model in (plain, packed, blocks):
        cache = model.make_cache()
        model(ids[:, :30], cache=cache)
        with pytest.MonkeyPatch.context() as patch:
            for entry in ENTRIES:
                _record(patch, entry, seen[entry.name])
            for start in (30, 35, 40):
                streams = model.forward(ids[:, start : start + 5], cache)[1]
            model.draft(streams, ids[:, 41:46], model.mtp.make_cache())
    return seen


def _record(patch: pytest.MonkeyPatch, entry: Entry, into: list[int]) -> None:
    """Append the rows of every call, -1 for entries that windows must not reach, 1 for those that take rows alone."""
    owner = importlib.import_module(entry.module)
    *classes, name = entry.name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    def recorded(*args):
        into.append(1 if entry.alone else -1 if entry.rows is None else entry.rows(*args[len(classes) :]))
        return original(*args)

    patch.setattr(owner, name, recorded)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_entries_get_one_row_of_a_window_at_a_time(calls, entry):
    assert set(calls[entry.name]) == ({1} if entry.rows or entry.alone else set())
