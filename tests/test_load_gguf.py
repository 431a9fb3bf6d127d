"""GGUF files in place of a model folder: the same logits and text, packed in memory, or one line that says why not."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from checkpoints import SHAPES, random_weights, tiny_config, tokens, write
from compare import assert_same_up_to_ties, run_in_pieces
from custom_kernels import dispatch
from custom_kernels.ggml_blocks import format_by_name, quantize
from custom_kernels.portable import Launch
from disks import read_with
from gguf_models import q8_0_matrices, tiny_metadata, tiny_tensors, write_gguf
from gguf_writer import Tensor, Typed, encode, packed, write_shards
from metal_sim import needs_simulator, verify
from mlx_moe import load, load_model, quantize_model, runtime, save_model, streaming
from mlx_moe.cache import WINDOW
from mlx_moe.cli import main
from mlx_moe.config import ConfigError
from mlx_moe.formats.gguf import open_gguf
from mlx_moe.formats.gguf_model import model_config, read_weights
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.generation import generate_tokens, stream_generate
from mlx_moe.models.qwen4_exp.gguf_names import recipes
from mlx_moe.paging import experts as experts_module
from mlx_moe.weights import named_parameters, packed_modules
from tiny_tokenizer import gguf_keys, save_tokenizer, short_config

ORACLES = ("IQ2_XS-IQ4_NL-Q8_0", "IQ2_S-Q2_0-Q6_K")
ODD: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide_values": {**SHAPES["wide_values"]},
    "odd": {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 192, "vocab_size": 131},
    "no_ple": {"ple_layer_ids": []},
}
IDS = tokens(60)
PROMPT = WINDOW + 1
"""Tokens: the fewest that do not go through as a window."""


def forward(model, ids: np.ndarray = IDS) -> np.ndarray:
    return np.array(model(mx.array(ids[None]))[0].astype(mx.float32))


def greedy(model, count: int = 12) -> list[int]:
    return [token for token, _ in generate_tokens(IDS.tolist(), model, max_tokens=count)]


def mixed(array: mx.array, name: str) -> Tensor:
    """Experts of width 192 as published files have them: Q8_0 gate, IQ4_NL up, Q2_0 down; other matrices Q8_0."""
    kind = {"ffn_up_exps": "IQ4_NL", "ffn_down_exps": "Q2_0"}.get(name.split(".")[-2], "Q8_0")
    return packed(quantize(array, format_by_name(kind)), kind)


# The oracle's files


@pytest.fixture(scope="module", params=ORACLES)
def oracle_model(oracle, request):
    path = oracle / f"{request.param}.gguf"
    return load_model(path, mx.float32)[0], path


@pytest.mark.sample(1)
@pytest.mark.parametrize("piece", [pytest.param(1, marks=pytest.mark.full), 7, 10_000])
def test_oracle_logits(oracle_model, piece):
    """Within 1e-4 of the same weights run in float64."""
    model, path = oracle_model
    stored = np.load(path.with_suffix(".f32.npz"))
    ids, want = stored["tokens"], stored["logits"].astype(np.float32)
    assert_same_up_to_ties(lambda n: run_in_pieces(model, ids[:n], piece), want, 1e-4, f"{path.name} in {piece}")


def test_oracle_against_llama_cpp(oracle_model):
    """Its activations are quantised, so this is a loose check of the whole file."""
    model, path = oracle_model
    stored = np.load(path.with_suffix(".npz"))
    got, want = forward(model, stored["tokens"]), stored["logits"]
    assert np.abs(got - want).mean() < 0.05
    assert (got.argmax(axis=-1) == want.argmax(axis=-1)).mean() >= 0.9


@pytest.mark.sample(1)
def test_oracle_greedy_text(oracle_model):
    """That of the weights in float64, as far as the file has it."""
    model, path = oracle_model
    stored = np.load(path.with_suffix(".f32.npz"))
    want = stored["greedy"].tolist()
    assert [t for t, _ in generate_tokens(stored["tokens"].tolist(), model, max_tokens=len(want))] == want


# Files of our own


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(shape, formats) -> (model of the folder, model of the GGUF file), with draft layers, in float32."""
    models = {}

    def get(shape: str, formats: str = "F32"):
        if (shape, formats) not in models:
            folder = tmp_path_factory.mktemp(shape)
            raw = tiny_config(**ODD[shape])
            weights = random_weights(raw, seed=3, mtp=True)
            hf = write(folder / "hf", raw, weights)
            choice = q8_0_matrices if formats == "Q8_0" else lambda name: formats
            gguf = write_gguf(folder / "m.gguf", raw, weights, mtp=True, formats=choice)
            models[shape, formats] = tuple(load_model(path, mx.float32)[0] for path in (hf, gguf))
        return models[shape, formats]

    return get


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", ODD)
def test_logits_of_the_folder(made, shape):
    """Unquantised, a file gives the checkpoint's logits, in pieces of any size, and its draft layer's."""
    reference, model = made(shape)
    want = forward(reference)
    for piece in (7, 10_000):
        assert_same_up_to_ties(lambda n, piece=piece: run_in_pieces(model, IDS[:n], piece), want, 1e-4, shape)
    streams = reference.streams(mx.array(IDS[None]))
    drafts = [m.draft(streams[:, :-1], mx.array(IDS[None, 1:]), m.mtp.make_cache())[0] for m in (reference, model)]
    assert mx.abs(drafts[0] - drafts[1]).max().item() < 1e-4


def test_greedy_text_of_the_folder(made):
    reference, model = made("plain")
    assert greedy(model) == greedy(reference)


def test_experts_of_width_192_and_an_odd_vocabulary(tmp_path):
    """In the formats of published files; against the same numbers in a folder of their own."""
    raw = tiny_config(**ODD["odd"])
    tensors = tiny_tensors(raw, random_weights(raw, 4))
    matrices = {name: t for name, t in tensors.items() if len(t.dims) > 1 and q8_0_matrices(name) == "Q8_0"}
    path = tmp_path / "m.gguf"
    path.write_bytes(encode(tiny_metadata(raw), {**tensors, **{n: mixed(_numbers(t), n) for n, t in matrices.items()}}))
    model, file = load_model(path, mx.float32)[0], open_gguf(path)
    formats = {part.format.name for part in model._experts._layers[0]}
    assert model.config.vocab_size == 131 and formats == {"Q8_0", "IQ4_NL", "Q2_0"}
    assert {module.format.name for _, module in packed_modules(model) if module.format} == {"Q8_0"}
    numbers = {name: part.numbers() for name, part in read_weights(file, recipes(file.tensors, model.config))}
    reference, _ = load_model(write(tmp_path / "hf", model_config(file), numbers), mx.float32)
    assert_same_up_to_ties(lambda n: forward(model, IDS[:n]), forward(reference), 1e-4, "width 192")


def _numbers(tensor: Tensor) -> mx.array:
    """The contents of an F32 tensor."""
    return mx.array(np.frombuffer(tensor.data, np.float32).reshape(tuple(reversed(tensor.dims))))


def _bits(cache) -> list[np.ndarray]:
    return [
        np.array(value.astype(mx.float32) if isinstance(value, mx.array) else value)
        for layer in cache
        for value in layer.state
        if value is not None
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_window_rows_are_bit_equal_to_steps(tmp_path, dtype):
    """Logits and states of windows of 2 to 8 tokens, before and beyond the attention budget."""
    raw = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", raw, random_weights(raw, 3), formats=q8_0_matrices)
    model = load_model(path, dtype)[0]
    for prompt in (3, 37):
        ids = mx.array(tokens(prompt + WINDOW, seed=prompt)[None])
        stepped = model.make_cache()
        model(ids[:, :prompt], cache=stepped)
        rows = [model(ids[:, t : t + 1], cache=stepped) for t in range(prompt, prompt + WINDOW)]
        for n in (2, 5, WINDOW):
            windowed = model.make_cache()
            model(ids[:, :prompt], cache=windowed)
            parts = [model(ids[:, t : t + n], cache=windowed) for t in range(prompt, prompt + WINDOW, n)]
            got = mx.concatenate(parts, axis=1)[:, :WINDOW]
            assert got.dtype == dtype and mx.array_equal(got, mx.concatenate(rows, axis=1)), f"{n} after {prompt}"
            assert all(np.array_equal(a, b) for a, b in zip(_bits(windowed), _bits(stepped), strict=True)), n


def test_batches_of_windows(made):
    """Rows of a batch go through the ops 8 at a time: the bits of each sequence alone."""
    _, model = made("plain", "Q8_0")
    ids = mx.array(np.stack([tokens(5, seed) for seed in range(3)]))
    together = model(ids)
    for row in range(3):
        assert mx.array_equal(together[row], model(ids[row : row + 1])[0]), row


@pytest.mark.parametrize("group", [1, 3])
def test_prompts_in_groups_of_experts(made, monkeypatch, group):
    """However few experts are unpacked at once, and however few tokens are added up at once."""
    _, model = made("plain", "Q8_0")
    want = forward(model)
    one = model._experts._layers[0].unpacked_bytes(mx.float32)
    monkeypatch.setattr(experts_module, "WORKSPACE_BYTES", group * one + 1)
    monkeypatch.setattr(experts_module, "TOKENS_AT_ONCE", 7)
    unpacked, original = [], experts_module.expert_dequantize
    monkeypatch.setattr(
        experts_module, "expert_dequantize", lambda words, *rest: unpacked.append(words.size) or original(words, *rest)
    )
    assert np.abs(forward(model) - want).max() < 1e-5
    assert max(unpacked) == group and len(unpacked) >= 3 * 4 * 8 // group


# What is in memory


def test_what_stays_packed_and_what_becomes_numbers(made):
    _, model = made("plain", "Q8_0")
    formats = {path: module.format and module.format.name for path, module in packed_modules(model)}
    assert formats["lm_head"] == formats["model.embed_tokens"] == "Q8_0"
    assert formats["model.layers.3.self_attn.indexer.index_qk_proj"] == formats["mtp.fc_hidden"] == "Q8_0"
    assert formats["model.layers.0.mlp.gate"] is None
    types = {name: tensor.dtype for name, tensor in named_parameters(model).items()}
    assert types["lm_head.weight"] == mx.uint8 and types["model.layers.0.mlp.gate.weight"] == mx.float32
    assert not any(".experts." in name or "ngram" in name for name in types), "experts and table are elsewhere"


@pytest.mark.parametrize("format", ["BF16", "F16", "F32"])
def test_plain_numbers_are_kept_in_the_type_to_compute_in(tmp_path, format):
    raw = short_config()
    path = write_gguf(tmp_path / "m.gguf", raw, random_weights(raw), formats=lambda name: format)
    model = load_model(path, mx.bfloat16)[0]
    assert not any(module.format for _, module in packed_modules(model))
    parameters = named_parameters(model)
    assert parameters["model.layers.0.linear_attn.in_proj_a.weight"].dtype == mx.bfloat16
    assert parameters["model.layers.0.linear_attn.A_log"].dtype == mx.float32
    assert model(mx.array([[1, 2]])).dtype == mx.bfloat16


def test_the_table_is_read_by_rows(tmp_path, monkeypatch):
    """16 rows or fewer per token, each once per pass; nothing of it while loading."""
    raw = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", raw, random_weights(raw), formats=q8_0_matrices)
    table = open_gguf(path).place("per_layer_token_embd.weight")
    read, original = [], os.preadv

    def watch(fd: int, views: list[memoryview], at: int) -> int:
        if table.offset <= at < table.offset + table.size:
            read.append((at - table.offset, len(views[0])))
        return original(fd, views, at)

    read_with(monkeypatch, watch)
    model = load_model(path, mx.float32)[0]
    assert not read
    mx.eval(model(mx.array([[5, 5, 5, 9]])))
    assert 8 < len(read) == len(set(read)) <= 8 * 4, "8 heads"
    assert all(at % table.row_bytes == 0 and size == table.row_bytes for at, size in read)


def test_kernels_that_loading_asks_for(tmp_path, monkeypatch):
    """Those of the formats that are in the file, and no others."""
    asked = []
    monkeypatch.setattr(runtime, "require_kernels", lambda kernels: asked.append(set(kernels)))
    raw = short_config()
    load_model(write_gguf(tmp_path / "m.gguf", raw, random_weights(raw), formats=q8_0_matrices), mx.float32)
    assert asked == [
        {
            *((op, "") for op in ("gdn_step", "gdn_commit", "moce_route", "expert_combine")),
            *((op, "Q8_0") for op in ("block_gemv", "block_dequantize", "expert_down", "expert_dequantize")),
            ("expert_gate_up", "Q8_0+Q8_0"),
            ("block_dequantize", "F32"),
        }
    ]


def test_experts_that_do_not_fit_into_memory(tmp_path, monkeypatch):
    raw = short_config()
    path = write_gguf(tmp_path / "m.gguf", raw, random_weights(raw))
    machine = SimpleNamespace(memory_bytes=500_000, working_set_bytes=None)
    monkeypatch.setattr(streaming, "device", lambda: machine)
    line = refusal(path, ValueError)
    said = r"0\.\d\d GB are needed .*, 0\.00 GB may be used;.* 0\.0 GB(, of which .*)?"  # other models may be there
    assert re.fullmatch(f"{path}: {said}", line), line


def test_saving_and_quantising_are_refused(made, tmp_path):
    _, model = made("plain", "Q8_0")
    with pytest.raises(ValueError, match="as their files have them cannot be saved as a folder; load a model folder"):
        save_model(tmp_path / "out", model, {})
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="as their files have them cannot be quantised again; load a model folder"):
        quantize_model(model)


# Files and shards


@pytest.fixture(scope="module")
def tiny():
    """(metadata, tensors) of a small model, and the logits that it should give."""
    raw = short_config()
    return tiny_metadata(raw), tiny_tensors(raw, random_weights(raw, 7), q8_0_matrices)


@pytest.fixture(scope="module")
def tiny_logits(tiny, tmp_path_factory) -> np.ndarray:
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    path.write_bytes(encode(*tiny))
    return forward(load_model(path)[0])


@pytest.mark.parametrize("source", ["folder", 0, 2])
def test_shards(tmp_path, tiny, tiny_logits, source):
    paths = write_shards(tmp_path, *tiny, 3)
    model, _ = load_model(tmp_path if source == "folder" else paths[source])
    assert np.array_equal(forward(model), tiny_logits)


@pytest.mark.parametrize("source", ["folder", "b.gguf"])
def test_shards_renamed_and_reordered(tmp_path, tiny, tiny_logits, source):
    for path, name in zip(write_shards(tmp_path, *tiny, 3), ("c", "a", "b"), strict=True):
        path.rename(tmp_path / f"{name}.gguf")
    model, _ = load_model(tmp_path if source == "folder" else tmp_path / source)
    assert np.array_equal(forward(model), tiny_logits)


def test_a_missing_shard_is_named(tmp_path, tiny):
    paths = write_shards(tmp_path, *tiny, 3)
    paths[1].unlink()
    assert paths[1].name in refusal(paths[0], FileFormatError)
    assert paths[1].name in refusal(tmp_path, FileFormatError)


def test_folders_of_both_kinds(tmp_path):
    """Safetensors go before a GGUF file that lies beside them."""
    raw = short_config()
    weights = random_weights(raw)
    write(tmp_path / "m", raw, weights)
    write_gguf(tmp_path / "m" / "m.gguf", raw, weights, formats=q8_0_matrices)
    assert not any(module.format for _, module in packed_modules(load_model(tmp_path / "m")[0]))
    (tmp_path / "m" / "model.safetensors").unlink()
    assert any(module.format for _, module in packed_modules(load_model(tmp_path / "m")[0]))


def test_a_home_folder(tmp_path, tiny, tiny_logits, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(encode(*tiny))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert np.array_equal(forward(load_model("~/m.gguf")[0]), tiny_logits)


def test_ratios_that_a_converter_lost(tmp_path, made, caplog):
    """All 0: a warning, and sparse attention as if they were right."""
    reference, _ = made("plain")
    raw = tiny_config()
    metadata = tiny_metadata(raw) | {"qwen4exp.attention.compress_ratios": Typed("[i32]", [0] * 4)}
    (tmp_path / "m.gguf").write_bytes(encode(metadata, tiny_tensors(raw, random_weights(raw, 3, mtp=False))))
    with caplog.at_level(logging.WARNING):
        model, _ = load_model(tmp_path / "m.gguf", mx.float32)
    assert "compress_ratios are all 0" in caplog.text
    ids = tokens(90)
    assert_same_up_to_ties(lambda n: forward(model, ids[:n]), forward(reference, ids), 1e-4, "compress_ratios 0")


# The draft layer


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """A folder with a model whose file has a draft layer, one without, and the draft layer alone; (folder, raw)."""
    folder = tmp_path_factory.mktemp("drafts")
    raw = short_config()
    weights = random_weights(raw, 3, mtp=True)
    tensors = tiny_tensors(raw, weights, q8_0_matrices)
    alone = {name: t for name, t in tensors.items() if name.startswith(("blk.2.", "token_embd", "output."))}
    trunk = {name: t for name, t in tensors.items() if not name.startswith("blk.2.")}
    for name, part, mtp in (("both", tensors, True), ("trunk", trunk, False), ("draft", alone, True)):
        (folder / name).mkdir()
        (folder / name / f"{name}.gguf").write_bytes(encode(tiny_metadata(raw, mtp), part))
    return folder


def draft_logits(model) -> mx.array:
    ids = mx.array(IDS[None])
    return model.draft(model.streams(ids[:, :-1]), ids[:, 1:], model.mtp.make_cache())[0]


def test_a_draft_layer_in_a_file_of_its_own(drafts):
    """The same bits as in the model's file."""
    one, _ = load_model(drafts / "both", mx.float32)
    two, _ = load_model(drafts / "trunk", mx.float32, mtp=drafts / "draft" / "draft.gguf")
    assert one.has_mtp and two.has_mtp and mx.array_equal(draft_logits(one), draft_logits(two))
    assert np.array_equal(forward(one), forward(two))
    from_both, _ = load_model(drafts / "trunk", mx.float32, mtp=str(drafts / "both" / "both.gguf"))
    assert mx.array_equal(draft_logits(one), draft_logits(from_both)), "a whole model's file has one too"


def test_auto_looks_beside_the_model(drafts, tmp_path, caplog):
    (tmp_path / "model.gguf").write_bytes((drafts / "trunk" / "trunk.gguf").read_bytes())
    assert not load_model(tmp_path / "model.gguf")[0].has_mtp
    (tmp_path / "mtp-model.gguf").write_bytes((drafts / "draft" / "draft.gguf").read_bytes())
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "other.gguf").write_bytes((drafts / "both" / "both.gguf").read_bytes())
    found, _ = load_model(tmp_path / "model.gguf")
    assert found.has_mtp
    assert mx.array_equal(draft_logits(found), draft_logits(load_model(drafts / "both")[0]))
    assert not load_model(tmp_path / "model.gguf", mtp=None)[0].has_mtp
    (tmp_path / "mtp-2.gguf").write_bytes((drafts / "draft" / "draft.gguf").read_bytes())
    with caplog.at_level(logging.WARNING):
        assert not load_model(tmp_path / "model.gguf")[0].has_mtp
    assert "several draft layers" in caplog.text and "mtp-2.gguf" in caplog.text


def test_without_the_draft_layer(drafts, tmp_path):
    """It costs memory, so it can be left out, of folders too."""
    one, none = (load_model(drafts / "both", mtp=mtp)[0] for mtp in ("auto", None))
    assert one.has_mtp and not none.has_mtp and none._experts.nbytes < one._experts.nbytes
    assert np.array_equal(forward(one), forward(none))
    raw = short_config()
    folder = write(tmp_path / "hf", raw, random_weights(raw, 3, mtp=True))
    assert load_model(folder)[0].has_mtp and not load_model(folder, mtp=None)[0].has_mtp


def test_draft_layers_that_do_not_fit(drafts, tmp_path, tiny):
    (tmp_path / "m.gguf").write_bytes(encode(*tiny))
    line = refusal(tmp_path / "m.gguf", FileFormatError, mtp=drafts / "trunk" / "trunk.gguf")
    assert line.startswith(f"{drafts / 'trunk' / 'trunk.gguf'}: holds no draft layer of this model (blk.2.nextn")
    raw = short_config(hidden_size=96)
    write_gguf(tmp_path / "wide.gguf", raw, random_weights(raw, mtp=True), mtp=True)
    assert "has shape" in refusal(tmp_path / "m.gguf", FileFormatError, mtp=tmp_path / "wide.gguf")
    assert "alone; name the model's file" in refusal(drafts / "draft" / "draft.gguf", ConfigError)
    folder = write(tmp_path / "hf", short_config(), random_weights(short_config()))
    assert "the folder's own" in refusal(folder, ValueError, mtp=tmp_path / "wide.gguf")


# Refusals


def refusal(path: Path | str, kind: type[Exception], **options: Any) -> str:
    """The one line with which loading is refused."""
    with pytest.raises(kind) as caught:
        load_model(path, **options)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 400, line
    return line


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "llama"}, "general.architecture is 'llama'; supported: qwen4exp"),
        ({"general.architecture": "clip", "general.type": "mmproj"}, "image encoder alone; name the text model's file"),
        ({"qwen4exp.expert_gating_func": 2}, "expert_gating_func is 2"),
        ({"qwen4exp.ple.layer_multipliers": Typed("[u64]", [3, 5, 7])}, "layer_multipliers in the file is not what"),
        ({"qwen4exp.attention.indexer.top_k": 30}, "indexer_budget is 30"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_metadata_that_cannot_be_run(tmp_path, tiny, keys, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(encode({**tiny[0], **keys}, tiny[1]))
    line = refusal(path, ConfigError)
    assert line.startswith(f"{path}: ") and message in line, line


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("blk.1.attn_q.weight", FileFormatError, "1 tensor(s) missing, first model.layers.1.self_attn.q_proj.weight"),
        ("blk.1.ffn_down_exps.weight", FileFormatError, "'blk.1.ffn_down_exps.weight' is missing"),
        ("blk.1.ffn_up_exps.weight", ConfigError, "blk.1.ffn_up_exps.weight is missing"),
        ("per_layer_token_embd.weight", ConfigError, "per_layer_token_embd.weight is missing"),
    ],
)
def test_missing_tensors_are_named(tmp_path, tiny, name, kind, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(encode(tiny[0], {key: tensor for key, tensor in tiny[1].items() if key != name}))
    line = refusal(path, kind)
    assert line.startswith(f"{path}: ") and message in line, line


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"blk.1.attn_k.weight": "blk.1.attn_q.weight"}, FileFormatError, "self_attn.k_proj.weight has shape"),
        ({"blk.1.attn_output.weight": "token_embd.weight"}, FileFormatError, "self_attn.o_proj.weight has shape"),
        ({"blk.9.attn_q.weight": "blk.1.attn_q.weight"}, ConfigError, "'blk.9.attn_q.weight' has no place"),
    ],
    ids=["rows", "columns", "unknown"],
)
def test_tensors_that_do_not_fit(tmp_path, tiny, change, kind, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(encode(tiny[0], {**tiny[1], **{name: tiny[1][other] for name, other in change.items()}}))
    line = refusal(path, kind)
    assert message in line and "m.gguf" in line, line


def test_formats_that_are_not_supported(tmp_path, tiny):
    for name in ("blk.1.attn_q.weight", "blk.1.ffn_up_exps.weight"):
        odd = tiny[1][name]._replace(type_id=11)
        (tmp_path / "m.gguf").write_bytes(encode(tiny[0], {**tiny[1], name: odd}))
        line = refusal(tmp_path / "m.gguf", FileFormatError)
        assert f"tensor {name!r}: ggml type id 11 is not supported" in line, line


def test_options_that_do_not_apply(tmp_path, tiny):
    (tmp_path / "m.gguf").write_bytes(encode(*tiny))
    assert "lazy cannot be used with GGUF" in refusal(tmp_path / "m.gguf", ValueError, lazy=True)
    assert "norm_convention cannot" in refusal(tmp_path / "m.gguf", ValueError, norm_convention="raw")
    assert str(tmp_path / "x.gguf") + ": no such file" == refusal(tmp_path / "x.gguf", FileNotFoundError)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "m.gguf").write_bytes(b"GGUF and nothing more")
    assert "m.gguf" in refusal(tmp_path / "d", FileFormatError)


def test_an_expert_that_cannot_be_read(tmp_path, tiny, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(encode(*tiny))
    read_with(monkeypatch, lambda *_: 0)
    line = refusal(tmp_path / "m.gguf", OSError)
    assert re.search(r"m.gguf: expert \d of layer \d cannot be read \(the file ends at", line), line


def test_a_table_that_became_shorter(tmp_path, tiny):
    """Seen when its rows are needed: an error, no wrong text."""
    tensors = {name: t for name, t in tiny[1].items() if "per_layer" not in name}
    tensors["per_layer_token_embd.weight"] = tiny[1]["per_layer_token_embd.weight"]
    (tmp_path / "m.gguf").write_bytes(encode(tiny[0], tensors))
    model, _ = load_model(tmp_path / "m.gguf")
    os.truncate(tmp_path / "m.gguf", open_gguf(tmp_path / "m.gguf").place("per_layer_token_embd.weight").offset)
    with pytest.raises(OSError, match=r"m.gguf: n-gram row \d+ cannot be read \(the file is not what it was"):
        mx.eval(model(mx.array([[1, 2, 3]])))


# Text and the command


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory, tiny) -> Path:
    """A file that carries its tokenizer."""
    path = tmp_path_factory.mktemp("text") / "m.gguf"
    path.write_bytes(encode({**tiny[0], **gguf_keys()}, tiny[1]))
    return path


def test_load_takes_the_tokenizer_of_the_file(with_tokenizer):
    model, tokenizer, config = load(with_tokenizer, return_config=True)
    assert tokenizer.decode(tokenizer.encode("the test")) == "the test"
    assert tokenizer.eos_token_ids == {123, 127} and config["linear_value_heads_tiled"] is True
    assert "".join(part.text for part in stream_generate(model, tokenizer, "the test", max_tokens=5))


def test_load_prefers_a_tokenizer_beside_the_file(tmp_path, tiny):
    (tmp_path / "m.gguf").write_bytes(encode(*tiny))
    with pytest.raises(FileFormatError, match=r"m.gguf: tokenizer.ggml.model .*put tokenizer.json beside"):
        load(tmp_path / "m.gguf")
    save_tokenizer(tmp_path)
    for source in (tmp_path, tmp_path / "m.gguf"):
        tokenizer = load(source)[1]
        assert tokenizer.decode(tokenizer.encode("the test")) == "the test"


def test_the_command_writes_the_same_text(with_tokenizer, capsys):
    model, tokenizer = load(with_tokenizer)
    want = "".join(part.text for part in stream_generate(model, tokenizer, "the test", max_tokens=6))
    arguments = ["--prompt", "the test", "--max-tokens", "6", "--verbose", "F"]
    assert main(["generate", "--model", str(with_tokenizer), *arguments]) == 0
    assert capsys.readouterr().out == want + "\n"


@pytest.mark.parametrize(("value", "has"), [("auto", True), ("none", False)])
def test_the_draft_layer_on_the_command_line(drafts, with_tokenizer, tmp_path, monkeypatch, value, has):
    from mlx_moe.cli import session

    loaded, original = [], session.load
    monkeypatch.setattr(session, "load", lambda *a, **k: loaded.append(original(*a, **k)) or loaded[-1])
    (tmp_path / "m.gguf").write_bytes(with_tokenizer.read_bytes())
    (tmp_path / "draft.gguf").write_bytes((drafts / "draft" / "draft.gguf").read_bytes())
    arguments = ["generate", "--model", str(tmp_path / "m.gguf"), "--max-tokens", "1"]
    assert main([*arguments, "--mtp", value]) == 0 and loaded[-1][0].has_mtp == has
    assert main([*arguments, "--mtp", str(tmp_path / "no.gguf")]) == 1


# With kernels


@pytest.mark.full
@needs_simulator
def test_kernels_give_the_logits_of_the_references(tmp_path, monkeypatch):
    """A prompt and a window of two tokens, every op of the path as the text that a Mac would run."""
    raw = short_config(hc_count=2, num_experts=8)
    path = write_gguf(tmp_path / "m.gguf", raw, random_weights(raw, 3), formats=q8_0_matrices)
    model = load_model(path, mx.float32)[0]

    def decode() -> mx.array:
        cache = model.make_cache()
        model(mx.array(tokens(PROMPT)[None]), cache=cache)
        return model(mx.array([[5, 6]]), cache=cache)

    with dispatch.forced("reference"):
        want = decode()
    launched: Counter[str] = Counter()

    def simulated(launch: Launch, backend: str) -> list[mx.array]:
        launched[launch.kernel.name] += 1
        return verify(launch.kernel.metal, **launch.arguments)

    monkeypatch.setattr(Launch, "run", simulated)
    with dispatch.forced("metal"):
        logits = decode()
    error = (mx.abs(logits - want).max() / mx.abs(want).max()).item()
    assert error < 1e-5, f"logits: relative error {error:.1e}"
    assert launched["expert_gate_up_Q8_0_Q8_0"] == launched["expert_down_Q8_0"] == 2
    assert launched["expert_dequantize_Q8_0"] == 3 * 2 and launched["block_dequantize_F32"] == 2
    assert launched["block_gemv_Q8_0"] > 10 and launched["block_dequantize_Q8_0"] > 10
