"""``mlx-moe convert``: every flag reaches the pack, errors are one line, and what is printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moe.cli import convert, main
from mlx_moe.formats.pack import open_pack
from packs import contents, wide_config, write_layout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    raw = wide_config(num_experts=2, num_experts_per_tok=1)
    return write_layout(tmp_path_factory.mktemp("source") / "hf", raw, "fused")


@pytest.fixture
def call(capsys, source, tmp_path):
    """Convert the source with these flags; (status, pack folder, standard output, standard error)."""

    def run(*argv: object, model: object = source, out: object = tmp_path / "pack"):
        capsys.readouterr()
        try:
            status = main(["convert", "--model", str(model), "--out", str(out), *map(str, argv)])
        except SystemExit as stop:
            status = stop.code
        return status, Path(str(out)), *capsys.readouterr()

    return run


def kinds(folder: Path) -> list[str]:
    return [part.format for part in open_pack(folder).experts.layers[0].parts]


def assert_refused(result, *words: str, status: int = 1) -> None:
    assert result[0] == status and re.fullmatch(r"mlx-moe( convert)?: error: [^\n]*\n", result[3]), result
    assert all(word in result[3] for word in words), result[3]


def test_model_and_out(call):
    status, folder, out, err = call()
    assert (status, err) == (0, "") and re.fullmatch(r"Wrote \d\.\d\d MB: .*pack\n", out)
    assert kinds(folder) == ["IQ2_XS", "IQ2_XS", "Q2_0"]
    assert_refused(call(), "holds other files")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--experts", "iq2_s"], ["IQ2_S", "IQ2_S", "Q2_0"]),
        (["--experts", "keep"], ["BF16", "BF16", "BF16"]),
        (["--down", "iq4_nl"], ["IQ2_XS", "IQ2_XS", "IQ4_NL"]),
        (["--experts", "q8_0", "--down", "keep"], ["Q8_0", "Q8_0", "BF16"]),
    ],
)
def test_expert_types(call, flags, found):
    assert kinds(call(*flags)[1]) == found


@pytest.mark.parametrize(("choice", "bits"), [("8", 8), ("6", 6), ("4", 4), ("bf16", None), ("keep", None)])
def test_dense(call, choice, bits):
    section = open_pack(call("--dense", choice, "--experts", "bf16")[1]).config.quantization
    assert (section["bits"] if section else None) == bits


@pytest.mark.parametrize(("choice", "name"), [("iq4_nl", "IQ4_NL"), ("q8_0", "Q8_0"), ("keep", "BF16")])
def test_ngram(call, choice, name):
    assert open_pack(call("--ngram", choice)[1]).rows.format == name


def test_copy_table(call, tmp_path):
    from checkpoints import random_weights, tiny_config
    from gguf_models import write_gguf

    raw = tiny_config()
    model = write_gguf(tmp_path / "model.gguf", raw, random_weights(raw))
    left = call(model=model, out=tmp_path / "left")[1]
    copied = call("--copy-table", model=model, out=tmp_path / "copied")[1]
    assert open_pack(left).rows.file == model and open_pack(copied).rows.file == copied / "ngram.safetensors"


def test_imatrix(call, tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj.weight"
    mx.save_safetensors(str(tmp_path / "i.safetensors"), {name: mx.arange(256).astype(mx.float32)})
    plain = contents(call(out=tmp_path / "plain")[1])
    weighed = contents(call("--imatrix", tmp_path / "i.safetensors", out=tmp_path / "weighed")[1])
    assert {file for file in plain if plain[file] != weighed[file]} == {"experts-00001-of-00002.safetensors"}
    assert_refused(call("--imatrix", tmp_path / "nothing", out=tmp_path / "x"), "nothing")


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("1.5gb", 15 * 10**8), ("900 MB", 9 * 10**8), ("1GiB", 1 << 30)]
)
def test_sizes(text, size):
    assert convert._bytes(text) == size


def test_memory(call):
    assert_refused(call("--memory", "100MB"), "--memory is 100MB", "at least 1000MB")
    assert_refused(call("--memory", "lots"), "'lots' is not a size", status=2)
    assert call("--memory", "1GB")[0] == 0


def test_norm_convention(call, tmp_path):
    """The wrong one is believed: this file is raw."""
    packs = [dict(open_pack(call("--norm-convention", which, out=tmp_path / which)[1]).dense()) for which in ("auto", "raw", "folded")]  # fmt: skip  # noqa: E501
    norms = [pack["model.hyper_connection_mixer.hc_norm.weight"].numbers() for pack in packs]
    assert mx.array_equal(norms[0], norms[1]) and mx.allclose(norms[2], norms[1] - 1, atol=1e-6)


def test_verify(call, capsys):
    status, folder, out, _ = call("--verify")
    assert status == 0 and re.search(r"Verified \d+ tensors, \d\.\d\d MB", out)
    assert main(["convert", "--out", str(folder), "--verify"]) == 0
    path = next(folder.glob("experts*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    capsys.readouterr()
    assert main(["convert", "--out", str(folder), "--verify"]) == 1
    err = capsys.readouterr().err
    assert path.name in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--experts", "iq1_s"], "iq2_xs"),
        (["--down", "iq2_xs"], "do not divide rows of 192"),
        (["--ngram", "fp8"], "--ngram is 'fp8'; supported: keep, iq4_nl"),
        (["--dense", "3"], "--dense"),
    ],
)
def test_wrong_choices_are_one_line(call, flags, word):
    result = call(*flags)
    assert_refused(result, word)
    assert not result[1].exists()


def test_problems_are_one_line(call, tmp_path, source, capsys):
    assert_refused(call(model=tmp_path / "nothing"), "nothing: no such file")
    assert_refused(call(model=tmp_path), "no GGUF model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((source / "config.json").read_text())
    assert_refused(call(model=tmp_path / "empty"), "no .safetensors")
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert_refused(call(model=tmp_path / "empty"), "llama")
    assert main(["convert", "--out", str(tmp_path / "x")]) == 1 and "--model is missing" in capsys.readouterr().err
    assert_refused(call("--nonsense"), "--nonsense", status=2)


def test_progress_is_bytes_to_do(source, tmp_path, monkeypatch):
    """As many as there are to write, of a conversion that goes on too."""
    import tqdm

    bars = []

    class Bar(tqdm.tqdm):
        def __init__(self, **options):
            super().__init__(**{**options, "disable": False})
            bars.append(self)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    assert main(["convert", "--model", str(source), "--out", str(tmp_path / "pack"), "--verify"]) == 0
    assert len(bars) == 2 and all(bar.n == bar.total > 1e6 for bar in bars)
