"""``mlx-moe info``: numbers that hold, 80 columns, warnings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from checkpoints import random_weights, tiny_config
from gguf_models import write_gguf
from mlx_moe import runtime
from mlx_moe.cli import main
from mlx_moe.cli.info import size
from mlx_moe.description import _ranges, describe
from packs import LAYOUTS, wide_config, write_layout


@pytest.fixture
def info(capsys):
    """The lines that the command prints, its status and standard error."""

    def run(path: object, *flags: str):
        status = main(["info", str(path), *flags])
        out, err = capsys.readouterr()
        assert all(len(line) <= 80 for line in out.splitlines() if not flags and " --model " not in line), out
        return status, out, err

    return run


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    raw = tiny_config(moe_intermediate_size=192)

    def formats(name: str) -> str:
        return "Q8_0" if "ffn_down_exps" in name else "BF16"

    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(path, raw, random_weights(raw, mtp=True), mtp=True, formats=formats)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_names_its_costs(info, tmp_path, layout):
    folder = write_layout(tmp_path / "hf", wide_config(), layout, mtp=True)
    status, out, _ = info(folder)
    assert status == 0 and f"mlx-moe convert --model {folder} --out PACK" in out
    assert "w - 1 is stored (raw)" in out and "with draft layer" in out
    found = describe(folder)
    weights = 3 * 192 * 256
    record = weights + 3 * 2 * 2 * 4 if layout == "fp8" else 2 * weights  # scales: 2 x 2 blocks of float32 each
    kind = "F8_E4M3" if layout == "fp8" else "BF16"
    assert {(e.gate, e.up, e.down) for e in found.experts.values()} == {(kind,) * 3}
    if layout != "fp8":
        assert found.token_bytes["experts"] == 2 * 3 * record and found.expert_bytes == 3 * 5 * record
    assert found.converted["experts"] == "IQ2_XS" and found.converted["down"] == "Q2_0"
    assert found.converted["expert_token_bytes"] == 2 * 3 * (2 * 192 * 74 + 256 * 54)


def test_a_gguf(info, gguf):
    status, out, _ = info(gguf)
    assert status == 0 and "GGUF, 1 file, " in out and "tiled, as in GGUF files" in out and "0-3, draft" in out
    found = describe(gguf)
    record = 2 * 192 * 64 * 2 + 64 * 192 // 32 * 34
    assert found.expert_bytes == 8 * 5 * record and found.token_bytes["experts"] == 4 * 3 * record
    streamed = found.expert_bytes + found.table.nbytes
    assert 0 < gguf.stat().st_size - found.dense_bytes - streamed < 20_000, "what is left is the header"


def test_a_pack(info, gguf, tmp_path):
    out, gguf = tmp_path / "pack", Path(shutil.copy(gguf, tmp_path / "model.gguf"))
    assert main(["convert", "--model", str(gguf), "--out", str(out)]) == 0
    info(gguf)
    status, text, _ = info(out)
    assert status == 0 and "pack, " in text and str(gguf)[:20] in text
    found, source = describe(out), describe(gguf)
    for name in ("experts", "token_bytes", "expert_bytes", "dense_bytes", "dense_types", "table"):
        assert getattr(found, name) == getattr(source, name), name
    gguf.rename(gguf.with_name("other.gguf"))
    status, text, _ = info(out)
    assert status == 1 and "warning:" in text and "--copy-table" in text
    assert json.loads(info(out, "--json")[1])["problem"]


def test_json_is_the_same(info, gguf):
    value = json.loads(info(gguf, "--json")[1])
    found = describe(gguf)
    assert value["kind"] == "GGUF" and value["cold_token_bytes"] == found.token_bytes
    assert value["expert_bytes"] == found.expert_bytes and value["ngram"]["bytes"] == found.table.nbytes
    assert value["experts"] == [
        {"layers": "0-3, draft", "gate": "BF16", "up": "BF16", "down": "Q8_0",
         "record_bytes": found.experts["model.layers.0"].record_bytes}
    ]  # fmt: skip


def test_the_demonstration_model(info):
    status, out, _ = info(runtime.DEMO)
    assert status == 0 and "4-bit" in out and "convert" not in out


def test_problems_are_one_line(info, tmp_path):
    for path, word in ((tmp_path / "nothing", "no such file"), (tmp_path, "no GGUF model")):
        status, out, err = info(path)
        assert (status, out) == (1, "") and word in err and err.count("\n") == 1
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert info(tmp_path / "x.gguf")[0] == 1


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1440, "1.44 kB"), (1868800, "1.87 MB"), (28.8e9, "28.8 GB"), (0.69e9, "0.69 GB"),
     (360e9, "360.0 GB")],
)  # fmt: skip
def test_size(count, text):
    assert size(count) == text


def test_ranges():
    assert _ranges([0, 2, 3, 4, 7], 7) == "0, 2-4, draft" and _ranges([6, 7], 7) == "6, draft"
