"""Packs in use: the logits of what they were made from, whatever that was."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import checkpoints
from compare import assert_same_up_to_ties, run_in_pieces
from gguf_models import write_gguf
from mlx_moe import load
from mlx_moe.cli import main
from mlx_moe.conversion import plan, run
from mlx_moe.conversion.choices import Choices
from mlx_moe.conversion.source import open_source
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.runtime import load_model, save_model
from packs import LAYOUTS, wide_config, write_layout
from tiny_tokenizer import save_tokenizer

IDS = checkpoints.tokens(40, vocab=128)


def convert(source, out, **choices):
    return run.run_plan(plan.make_plan(open_source(source), Choices(**choices)), out)


def logits_of(model, ids=IDS) -> np.ndarray:
    return np.array(model(mx.array(ids[None]))[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_logits_of_a_checkpoint(layout, tmp_path):
    """With nothing rounded the pack is the same model, in pieces and windows too, its draft layer included."""
    folder = write_layout(tmp_path / "hf", wide_config(), layout, mtp=True)
    pack = convert(folder, tmp_path / "pack", experts="bf16", down="bf16", dense="keep", ngram="bf16")
    want, got = (load_model(path, dtype=mx.float32)[0] for path in (folder, pack))
    reference = logits_of(want)
    for piece in (1, 7, 64):
        if layout == "fp8":  # experts and table are rounded once more, from FP8 times scale to BF16
            assert np.abs(run_in_pieces(got, IDS, piece) - reference).max() < 0.03 * np.abs(reference).max()
        else:
            what = f"pieces of {piece}"
            assert_same_up_to_ties(lambda n, p=piece: run_in_pieces(got, IDS[:n], p), reference, 1e-4, what)
    assert got.has_mtp and want.has_mtp
    assert not load_model(pack, mtp=None)[0].has_mtp


@pytest.mark.parametrize(("dense", "limit"), [("8", 0.01), ("4", 0.12)])
def test_dense_weights_may_be_packed(dense, limit, tmp_path):
    folder = write_layout(tmp_path / "hf", wide_config(), "fused")
    pack = convert(folder, tmp_path / "pack", experts="bf16", down="bf16", dense=dense, ngram="bf16")
    want, got = (dict(load_model(path, dtype=mx.float32)[0].named_modules()) for path in (folder, pack))
    names = [name for name, module in got.items() if getattr(module, "packing", None)]
    assert len(names) > 20 and "lm_head" in names
    for name in names:
        ours, theirs = (modules[name].dequantized() for modules in (got, want))
        error = mx.linalg.norm(ours - theirs) / mx.linalg.norm(theirs)
        assert got[name].packing["bits"] == int(dense) and 0 < error.item() < limit, f"{name}: {error}"


def test_no_logit_of_a_gguf_changes(tmp_path):
    """Kept as they are, blocks give the same bits; so does the table that stays in the GGUF."""
    config = wide_config()
    file = write_gguf(tmp_path / "model.gguf", config, checkpoints.random_weights(config, seed=3, mtp=True), mtp=True)
    pack = convert(file, tmp_path / "pack")
    want, got = (logits_of(load_model(path, dtype=mx.float32)[0]) for path in (file, pack))
    assert np.array_equal(want, got)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["IQ2_XS-IQ4_NL-Q8_0", "IQ2_S-Q2_0-Q6_K"])
def test_no_logit_of_the_oracle_changes(name, oracle, tmp_path):
    ids = np.load(oracle / f"{name}.f32.npz")["tokens"][:96]
    pack = convert(oracle / f"{name}.gguf", tmp_path / "pack")
    want, got = (logits_of(load_model(path, dtype=mx.float32)[0], ids) for path in (oracle / f"{name}.gguf", pack))
    assert np.array_equal(want, got)


def test_windows_are_bit_equal_to_steps(tmp_path):
    folder = write_layout(tmp_path / "hf", wide_config(), "fused")
    model, _ = load_model(convert(folder, tmp_path / "pack", experts="iq2_xs", down="iq4_nl"), dtype=mx.float32)
    stepped, windowed = model.make_cache(), model.make_cache()
    ids = mx.array(IDS[None])
    rows = [model(ids[:, t : t + 1], cache=stepped) for t in range(8)]
    assert mx.array_equal(mx.concatenate(rows, axis=1), model(ids[:, :8], cache=windowed))


def test_generate_runs_a_pack(tmp_path, capsys):
    folder = write_layout(tmp_path / "hf", wide_config(), "fused")
    save_tokenizer(folder)
    pack = convert(folder, tmp_path / "pack", experts="iq2_xs", down="iq4_nl")
    assert main(["generate", "--model", str(pack), "--prompt", "ab", "--max-tokens", "4", "--temp", "0"]) == 0
    assert "Generation: 4 tokens" in capsys.readouterr().out
    model, tokenizer = load(pack)
    assert model.model_type == "qwen4_exp" and tokenizer.encode("ab")


def test_what_a_pack_cannot(tmp_path):
    folder = write_layout(tmp_path / "hf", wide_config(), "fused")
    pack = convert(folder, tmp_path / "pack", experts="iq2_xs", down="iq4_nl")
    for options, word in (({"lazy": True}, "lazy"), ({"norm_convention": "raw"}, "norm_convention")):
        with pytest.raises(ValueError, match=f"{word} cannot be used with GGUF files and packs"):
            load_model(pack, **options)
    model, raw = load_model(pack)
    with pytest.raises(ValueError, match="cannot be saved"):
        save_model(tmp_path / "again", model, raw)
    next(pack.glob("experts*.safetensors")).unlink()
    with pytest.raises(FileFormatError, match="copy the pack again"):
        load_model(pack)
