"""``mlx-moe usage`` and ``mlx-moe profile``: what is remembered of a model is shown, made and forgotten."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from checkpoints import random_weights, write
from mlx_moe.cli import main
from mlx_moe.cli.usage import store_of
from mlx_moe.runtime import load_model
from paging.streamed import EXPERTS, LAYERS, TOP_K, write_model
from tiny_tokenizer import short_config

TEXT = "the rest of it, in order\0then another one; and the end of that"


@pytest.fixture
def path(tmp_path) -> Path:
    return write_model(tmp_path / "m.gguf", mtp=True, tokenizer=True)


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT)
    return tmp_path / "a.txt"


@pytest.fixture
def run(capsys):
    """(status, standard output, standard error) of one call."""

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(part) for part in argv])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


def test_what_a_run_leaves_is_shown_and_forgotten(run, path):
    assert run("usage", "--model", path)[:2] == (0, "Nothing is remembered of this model\n")
    call = ("generate", "--model", path, "-p", "the test", "-m", 4, "--expert-slots", 9)
    assert "Experts in memory at first" not in run(*call)[1]
    file = path.with_name("m.gguf.usage")
    status, out, _ = run("usage", "--model", path)
    assert status == 0 and str(file) in out and out.count("\n") == 2 + LAYERS + 1
    shown = json.loads(run("usage", "--model", path, "--json")[1])
    usage = store_of(path).read("usage")
    assert shown["usage"]["tokens"] == usage.tokens > 4 and shown["profile"] is None
    for layer, row in zip(shown["usage"]["layers"][:LAYERS], usage.counts, strict=False):
        best = layer["top"][0]
        assert best["share"] == pytest.approx(row.max() / row.sum()) and row[best["expert"]] == row.max()
        assert layer["in_memory"] == 9 and 0.25 < layer["top_quarter_share"] <= 1
    closing = run(*call)[1].splitlines()[-1]
    assert closing.startswith("Experts in memory at first: by usage, ") and len(closing.split()[-1]) == 16
    status, out, _ = run("usage", "--model", path, "--reset")
    assert (status, out) == (0, f"Deleted {file}\n") and not file.exists()
    assert json.loads(run("usage", "--model", path, "--reset", "--json")[1]) == {"deleted": []}


def test_a_profile_is_found_by_the_next_run(run, path, text, tmp_path):
    status, out, _ = run("profile", "--model", path, "--text", text, "--expert-slots", 9)
    file = path.with_name("m.gguf.profile")
    assert status == 0 and str(file) in out
    found = store_of(path).read("profile")
    assert (found.counts.sum(axis=1) == found.tokens * TOP_K).all() and found.counts.shape == (LAYERS, EXPERTS)
    assert store_of(path).read("usage") is None, "the text is not the user's"
    assert "profile: " in run("usage", "--model", path)[1]
    call = ("generate", "--model", path, "-p", "x", "-m", 1, "--expert-slots", 9, "--moce")
    assert "by profile, " in run(*call)[1]
    run("usage", "--model", path, "--reset")
    assert file.exists()
    assert run("profile", "--model", path, "--text", text, "--out", tmp_path / "p")[0] == 0
    assert (tmp_path / "p").read_bytes() == file.read_bytes(), "in memory or streaming"


@pytest.mark.parametrize(("flags", "tokens"), [(("--tokens", 5), 5), (("--tokens", 5, "--context", 2), 5), ((), None)])
def test_how_much_of_a_text(run, path, text, flags, tokens):
    assert run("profile", "--model", path, "--text", text, text, *flags)[0] == 0
    found = store_of(path).read("profile")
    assert found.tokens == 2 * tokens if tokens else found.tokens > 20
    if "--context" in flags:
        run("profile", "--model", path, "--text", text, text, *flags[:2])
        assert not np.array_equal(store_of(path).read("profile").counts, found.counts)


def test_a_folder_that_streams(run, tmp_path):
    raw = short_config()
    folder = write(tmp_path / "bare", raw, random_weights(raw))
    assert run("usage", "--model", folder)[:2] == (0, "Nothing is remembered of this model\n")
    with load_model(folder, expert_slots=TOP_K)[0] as model:
        model(mx.array([[1, 2, 3]]))
    status, out, _ = run("usage", "--model", folder)
    assert status == 0 and "usage: 3 tokens" in out
    assert run("usage", "--model", folder, "--reset")[0] == 0 and store_of(folder).find("usage") is None


def test_what_cannot_be(run, path, text, tmp_path):
    raw = short_config(layer_types=["linear_attention"] * 2, ple_layer_ids=[1, 2], ple_embed_dim=96)
    bare = write(tmp_path / "bare", raw, random_weights(raw))
    for argv, message in [
        (("usage", "--model", bare), "bare: its experts do not stream, so their use is not remembered: ple_layer_ids"),
        (("profile", "--model", bare, "--text", text), "its experts do not stream"),
        (("profile", "--model", path, "--text", tmp_path / "none"), "no such file"),
        (("profile", "--model", path, "--text", text, "--tokens", 0), "--tokens is 0; allowed: 1 or more"),
        (("profile", "--model", path, "--text", text, "--context", 0), "0 at a time; needed: at least 1"),
        (("profile", "--model", path, "--text", text, "--out", tmp_path / "no" / "p"), "its folder does not exist"),
    ]:
        status, _, error = run(*argv)
        assert status == 1 and message in error and error.count("\n") == 1
