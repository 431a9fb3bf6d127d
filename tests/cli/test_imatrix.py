"""``mlx-moe imatrix``: what it measures, and that conversions take it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import checkpoints
from mlx_moe.cli import main
from mlx_moe.conversion.collect import SquaredInputs, collect
from mlx_moe.conversion.imatrix import read_importances
from mlx_moe.runtime import load_model
from packs import wide_config, write_layout
from tiny_tokenizer import save_tokenizer


def test_means_of_squares_by_expert():
    """Rows of one expert are averaged; one that was never seen has the mean of all."""
    rows, ids = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32), np.arange(50) % 4
    squares = SquaredInputs(5, 6)
    squares.add(mx.array(rows[:20])[:, None], mx.array(ids[:20]))
    squares.add(mx.array(rows[20:])[:, None], mx.array(ids[20:]))
    got, overall = np.array(squares.means()), (rows**2).mean(axis=0)
    for expert in range(5):
        own = (rows[ids == expert] ** 2).sum(axis=0)
        want = (own + 4 * overall) / ((ids == expert).sum() + 4)
        assert np.allclose(got[expert], want, rtol=1e-5), expert
    assert np.allclose(got[4], overall, rtol=1e-5)


def test_what_goes_into_the_experts_is_seen(tmp_path):
    folder = write_layout(tmp_path / "hf", wide_config(), "fused")
    model, _ = load_model(folder, dtype=mx.float32)
    ids, steps = checkpoints.tokens(50, vocab=128).tolist(), []
    before = model(mx.array([ids]))
    found = collect(model, ids, context=20, progress=lambda done, total: steps.append((done, total)))
    assert mx.array_equal(model(mx.array([ids])), before), "the model is as it was"
    assert steps == [(20, 50), (40, 50), (50, 50)]
    config = model.config
    shapes = {"gate_up_proj": (config.num_experts, 256), "down_proj": (config.num_experts, 192)}
    assert {name: array.shape for name, array in found.items()} == {
        f"model.layers.{i}.mlp.experts.{part}.weight": shape for i in range(2) for part, shape in shapes.items()
    }
    assert all(mx.isfinite(array).all() and (array > 0).all() for array in found.values())


def test_conversions_take_the_file(tmp_path, capsys):
    folder = write_layout(tmp_path / "hf", wide_config(), "fused")
    save_tokenizer(folder)
    (tmp_path / "a.txt").write_text("the rain in spain stays mainly in the plain " * 9)
    out = tmp_path / "im.safetensors"
    assert main(["imatrix", "--model", str(folder), "--text", str(tmp_path / "a.txt"), "--out", str(out)]) == 0
    assert "Saved importances of 4 weights from" in capsys.readouterr().out
    config = load_model(folder)[0].config
    assert len(read_importances(out, ("model.layers.0", "model.layers.1"), config)) == 4
    plain, weighed = tmp_path / "plain", tmp_path / "weighed"
    options = ["convert", "--model", str(folder), "--experts", "iq2_xs", "--down", "iq4_nl"]
    assert main([*options, "--out", str(plain)]) == 0
    assert main([*options, "--imatrix", str(out), "--out", str(weighed)]) == 0
    different = [a.read_bytes() != (weighed / a.name).read_bytes() for a in sorted(plain.glob("experts*"))]
    assert different and all(different)


def test_refusals(tmp_path, capsys):
    folder = write_layout(tmp_path / "hf", wide_config(), "fused")
    save_tokenizer(folder)
    (tmp_path / "a.txt").write_text("ab")
    options = ["imatrix", "--model", str(folder), "--text", str(tmp_path / "a.txt"), "--out"]
    assert main([*options, str(tmp_path / "im.safetensors")]) == 1
    assert "needed: more than 8" in capsys.readouterr().err
    assert main([*options, str(tmp_path / "nowhere" / "im.safetensors")]) == 1
    assert "--out" in capsys.readouterr().err
    assert main(["imatrix", "--text", str(tmp_path / "missing"), "--out", str(tmp_path / "im.safetensors")]) == 1
    assert "missing" in capsys.readouterr().err
    model = load_model(folder)[0]
    model._experts = object()
    with pytest.raises(ValueError, match="not from GGUF or a pack"):
        collect(model, list(range(20)))
