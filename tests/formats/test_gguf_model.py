"""GGUF files as models: the configuration, every weight, where the streamed ones lie, and the logits of it all."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from checkpoints import SHAPES, random_weights, tiny_config, tokens, write
from compare import assert_same_up_to_ties
from custom_kernels.ggml_blocks import format_by_name, naive_dequantize
from gguf_models import tiled, tiny_metadata, tiny_tensors, write_gguf
from gguf_writer import Tensor, Typed, encode
from mlx_moe import load_model
from mlx_moe.config import ConfigError, ModelConfig
from mlx_moe.formats.checkpoint import read_checkpoint, write_checkpoint
from mlx_moe.formats.gguf import GgufFile, open_gguf
from mlx_moe.formats.gguf_model import expert_index, model_config, read_weights, row_index
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.models.qwen4_exp.gguf_config import _rope, hash_constants
from mlx_moe.models.qwen4_exp.gguf_names import is_streamed, recipes
from mlx_moe.models.qwen4_exp.sanitize import hash_buffers, sanitize
from mlx_moe.paging.ngram import NgramHash
from real_geometry import REAL

ORACLES = ("IQ2_XS-IQ4_NL-Q8_0", "IQ2_S-Q2_0-Q6_K")
NOT_IN_GGUF = ("split_ngram_parts", "linear_value_heads_tiled")
ERRORS = {"IQ2_XS": 0.33, "IQ2_S": 0.27, "IQ4_NL": 0.09, "Q2_0": 0.76, "Q8_0": 0.008, "Q6_K": 0.025}
"""Relative RMS errors of Gaussian weights, rounded up; Q2_0 with ggml's naive rounding."""


def config_of(file: GgufFile) -> ModelConfig:
    return ModelConfig.from_dict(model_config(file))


def weights_of(file: GgufFile):
    return dict(read_weights(file, recipes(file.tensors, config_of(file))))


def assert_same_config(got: ModelConfig, want: ModelConfig) -> None:
    assert got.linear_value_heads_tiled and not want.linear_value_heads_tiled
    for field in dataclasses.fields(ModelConfig):
        if field.name not in NOT_IN_GGUF:
            assert getattr(got, field.name) == getattr(want, field.name), field.name


def load_unpacked(file: GgufFile, folder: Path):
    """The model with every weight as float32 numbers, through the ordinary loader."""
    write_checkpoint(
        folder, {name: part.numbers().astype(mx.float32) for name, part in weights_of(file).items()}, model_config(file)
    )
    return load_model(folder, mx.float32)[0]


def run(model, ids: np.ndarray) -> np.ndarray:
    return np.array(model(mx.array(ids[None]))[0])


# The oracle's files


@pytest.fixture(params=ORACLES)
def oracle_gguf(oracle, request) -> Path:
    return oracle / f"{request.param}.gguf"


def test_oracle_config(oracle, oracle_gguf):
    file, want = open_gguf(oracle_gguf), ModelConfig.from_path(oracle / "hf")
    config = config_of(file)
    assert_same_config(config, want)
    stored = hash_buffers(read_checkpoint(oracle / "hf").tensors)
    got = hash_constants(file.metadata, config)
    assert got.keys() == stored.keys() and len(got) == 3
    for name, array in got.items():
        assert array.dtype == mx.int64 and mx.array_equal(array, stored[name]).item(), name


def test_oracle_weights(oracle, oracle_gguf):
    """Numbers are the checkpoint's once rounded to its BF16, blocks within their format's error."""
    config = ModelConfig.from_path(oracle / "hf")
    want = sanitize(read_checkpoint(oracle / "hf").tensors, config)
    got = weights_of(open_gguf(oracle_gguf))
    assert got.keys() == want.keys()
    formats = set()
    for name, part in got.items():
        expected = tiled(name, want[name], config)
        numbers = part.numbers()
        assert numbers.shape == expected.shape, name
        formats.add(part.format.name)
        if part.data.dtype == mx.uint8:
            expected = expected.astype(mx.float32)
            error = (mx.linalg.norm((numbers - expected).flatten()) / mx.linalg.norm(expected.flatten())).item()
            assert error < ERRORS[part.format.name], f"{name} ({part.format.name}): relative error {error:.4f}"
        else:
            equal = mx.array_equal(numbers.astype(expected.dtype), expected).item()
            assert equal, f"{name} ({part.format.name}) differs by {mx.abs(numbers - expected).max().item():.2e}"
    assert formats >= set(oracle_gguf.stem.split("-")) | {"F32", "BF16"}, formats


def test_oracle_logits(oracle_gguf, tmp_path):
    """Within 1e-4 of the same weights run in float64: nothing is permuted, and value heads are tiled."""
    model = load_unpacked(open_gguf(oracle_gguf), tmp_path)
    stored = np.load(oracle_gguf.with_suffix(".f32.npz"))
    ids, want = stored["tokens"], stored["logits"].astype(np.float32)
    assert_same_up_to_ties(lambda n: run(model, ids[:n]), want, 1e-4, oracle_gguf.name)


def test_oracle_experts(oracle_gguf):
    """Records put together from the reads of the index are the experts."""
    file = open_gguf(oracle_gguf)
    config, want = config_of(file), weights_of(file)
    index = expert_index(file, config)
    assert len(index.layers) == config.num_hidden_layers
    for layer, entry in enumerate(index.layers):
        for expert in (0, 7, entry.experts - 1):
            record = bytearray(entry.record_bytes)
            for part in index.reads(layer, expert):
                with part.file.open("rb") as stream:
                    stream.seek(part.offset)
                    record[part.at : part.at + part.length] = stream.read(part.length)
            numbers = []
            for part, at in zip(entry.parts, entry.places, strict=True):
                data = np.frombuffer(record, np.uint8)[at : at + part.length].reshape(part.shape[0], -1)
                numbers.append(naive_dequantize(mx.array(data), format_by_name(part.format)))
            base = f"model.layers.{layer}.mlp.experts"
            for name, got in (("gate_up_proj", mx.concatenate(numbers[:2])), ("down_proj", numbers[2])):
                same = mx.array_equal(got, want[f"{base}.{name}.weight"].numbers()[expert]).item()
                assert same, f"{base}.{name}, expert {expert}"


def test_oracle_rows(oracle_gguf):
    file = open_gguf(oracle_gguf)
    config = config_of(file)
    rows = row_index(file, config)
    want = weights_of(file)["model.layers.1.ple.ple_embedding.ngram_embedding.weight"].numbers()
    assert (rows.rows, rows.width) == want.shape
    assert rows.rows * rows.row_bytes == file.place("per_layer_token_embd.weight").size
    with rows.file.open("rb") as stream:
        stream.seek(rows.offset + 4000 * rows.row_bytes)
        row = np.frombuffer(stream.read(rows.row_bytes), np.uint8)
    assert mx.array_equal(naive_dequantize(mx.array(row), format_by_name(rows.format)), want[4000]).item()


# Files of our own


SINGLE_PLE = {name: {**changes, "output_gate_type": "sigmoid"} for name, changes in SHAPES.items() if name != "two_ple"}
SINGLE_PLE["no_ple"] = {"ple_layer_ids": []}
SINGLE_PLE["odd_vocabulary"] = {"vocab_size": 131, "moe_intermediate_size": 96, "seed": 1234}


def q8_where_it_fits(name: str) -> str:
    """Matrices as Q8_0; routers, scalar gates and the indexer's second part as other types."""
    if "conv1d" in name or "per_layer" in name:
        return "F32"
    return "BF16" if "ffn_gate_inp" in name or "indexer.k_proj" in name or "ssm_alpha" in name else "Q8_0"


@pytest.mark.parametrize("shape", SINGLE_PLE)
def test_round_trip(tmp_path, shape):
    """Converted and mapped back: the same configuration, every weight exactly, the draft layer's too."""
    raw = tiny_config(**SINGLE_PLE[shape])
    weights = random_weights(raw, mtp=True)
    file = open_gguf(write_gguf(tmp_path / "m.gguf", raw, weights, mtp=True))
    config = ModelConfig.from_dict(raw)
    want = sanitize({name: mx.array(value) for name, value in weights.items()}, config)
    got = weights_of(file)
    eos = config_of(file).replace(eos_token_ids=config.eos_token_ids)  # the second one is the tokenizer's
    assert_same_config(eos if config.ple_layer_ids else _without_ple(eos), _without_ple(config, config.ple_layer_ids))
    assert got.keys() == want.keys()
    for name, part in got.items():
        expected = tiled(name, want[name], config)
        exact = not name.endswith("A_log")
        close = mx.allclose(part.numbers(), expected, rtol=0, atol=0 if exact else 1e-6).item()
        assert part.numbers().shape == expected.shape and close, name


def _without_ple(config: ModelConfig, keep=()) -> ModelConfig:
    """Without PLE layers nothing of them is in the file."""
    if keep:
        return config
    names = ("ngram_size", "heads_per_ngram", "ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by")
    names += ("ple_embed_dim", "ple_conv_kernel_size")
    return config.replace(**{name: getattr(ModelConfig.from_dict(tiny_config()), name) for name in names})


@pytest.mark.parametrize("shape", ["plain", "wide_values", "ratio_8", "odd_vocabulary"])
def test_logits(tmp_path, shape):
    """A converted model gives the checkpoint's logits, and so does its draft layer."""
    raw = tiny_config(**SINGLE_PLE[shape])
    weights = random_weights(raw, mtp=True)
    reference, _ = load_model(write(tmp_path / "hf", raw, weights), mx.float32)
    model = load_unpacked(open_gguf(write_gguf(tmp_path / "m.gguf", raw, weights, mtp=True)), tmp_path / "unpacked")
    ids = tokens(60)
    want, streams = reference.forward(mx.array(ids[None]))
    assert_same_up_to_ties(lambda n: run(model, ids[:n]), np.array(want[0]), 1e-4, shape)
    draft = [m.draft(streams[:, :-1], mx.array(ids[None, 1:]), m.mtp.make_cache())[0] for m in (reference, model)]
    assert mx.abs(draft[0] - draft[1]).max().item() < 1e-4


@pytest.mark.parametrize("fused", [False, True])
def test_packed_weights_stay_packed(tmp_path, fused):
    raw = tiny_config()
    weights = random_weights(raw, mtp=True)
    tensors = tiny_tensors(raw, weights, q8_where_it_fits, fused)
    (tmp_path / "m.gguf").write_bytes(encode(tiny_metadata(raw, mtp=True), tensors))
    file = open_gguf(tmp_path / "m.gguf")
    got = weights_of(file)
    config = ModelConfig.from_dict(raw)
    want = sanitize({name: mx.array(value) for name, value in weights.items()}, config)
    for name, part in got.items():
        error = mx.abs(part.numbers().astype(mx.float32) - tiled(name, want[name], config)).max().item()
        assert error < 0.02, f"{name} ({part.format.name}): {error}"
    unpacked = {name for name, part in got.items() if part.data.dtype != mx.uint8 and part.data.ndim > 1}
    suffixes = {name.split(".", 3)[-1] for name in unpacked}
    assert "self_attn.indexer.index_qk_proj.weight" in suffixes, "its parts have two formats, so it becomes numbers"
    for name in ("mtp.fc_embedding", "mtp.fc_hidden", "model.layers.0.linear_attn.out_proj", "lm_head"):
        assert got[f"{name}.weight"].format.name == "Q8_0", name
    index = expert_index(file, config)
    assert len(index.layers) == config.num_hidden_layers + 1, "the draft layer has experts too"
    assert len(index.reads(4, 3)) == (2 if fused else 3)
    place = file.place(f"blk.4.ffn_{'gate_up' if fused else 'up'}_exps.weight")
    assert index.layers[4].up.offsets[0] == place.offset + (index.layers[4].gate.length if fused else 0)


def test_a_split_within_a_block(tmp_path):
    """Half of the draft layer's input is no whole number of blocks: numbers, not wrong bytes."""
    raw = tiny_config(hidden_size=48, ple_embed_dim=48, heads_per_ngram=3, moe_intermediate_size=32)
    weights = random_weights(raw, mtp=True)
    path = write_gguf(tmp_path / "m.gguf", raw, weights, True, formats=lambda n: "Q8_0" if "eh_proj" in n else "F32")
    got = weights_of(open_gguf(path))
    for name in ("mtp.fc_embedding.weight", "mtp.fc_hidden.weight"):
        assert got[name].format.name == "F32"
        assert mx.abs(got[name].data - mx.array(weights[name])).max().item() < 0.02, name


def test_the_draft_layer_alone(tmp_path):
    """A file of its own, with copies of what it shares; its final mix under either name."""
    raw = tiny_config()
    weights = random_weights(raw, mtp=True)
    config = ModelConfig.from_dict(raw)
    tensors = {n: t for n, t in tiny_tensors(raw, weights).items() if n.startswith(("blk.4.", "token_embd", "output."))}
    renamed = {name.replace("blk.4.nextn.hc_head", "output_hc"): tensor for name, tensor in tensors.items()}
    for variant in (tensors, renamed):
        (tmp_path / "mtp.gguf").write_bytes(encode(tiny_metadata(raw, mtp=True), variant))
        file = open_gguf(tmp_path / "mtp.gguf")
        got = dict(read_weights(file, recipes(file.tensors, config)))
        want = {name for name in sanitize({n: mx.array(w) for n, w in weights.items()}, config) if "mtp." in name}
        assert got.keys() == want
        mix = got["mtp.hyper_connection_mixer.input_mix_weight_up.weight"].data
        assert mx.array_equal(mix, mx.array(weights["mtp.hyper_connection_mixer.input_mix_weight_up.weight"])).item()


def test_mtp_without_its_key(tmp_path):
    raw = tiny_config()
    metadata = tiny_metadata(raw, mtp=True)
    del metadata["qwen4exp.nextn_predict_layers"]
    (tmp_path / "m.gguf").write_bytes(encode(metadata, tiny_tensors(raw, random_weights(raw, mtp=True))))
    assert config_of(open_gguf(tmp_path / "m.gguf")).num_hidden_layers == 4


def test_streamed_weights():
    assert is_streamed("mtp.layers.0.mlp.experts.down_proj.weight")
    assert is_streamed("model.layers.1.ple.ple_embedding.ngram_embedding.weight")
    assert not is_streamed("model.layers.1.mlp.shared_expert.up_proj.weight")


# The published model's geometry, in a file without contents


def real_tensors(layers: int) -> dict[str, Tensor]:
    """Embedding, table and experts as in published files, one after the other; no bytes."""
    shapes = {"token_embd.weight": ("Q8_0", 248320, 2560), "per_layer_token_embd.weight": ("IQ4_NL", 320_001_536, 160)}
    shapes["blk.3.indexer.q_proj.weight"] = ("BF16", 512, 2560)
    for i in range(layers):
        shapes |= {f"blk.{i}.ffn_{part}_exps.weight": ("IQ2_XS", 512, 640, 2560) for part in ("gate", "up")}
        shapes[f"blk.{i}.ffn_down_exps.weight"] = ("IQ4_NL", 512, 2560, 640)
    shapes[f"blk.{layers - 1}.nextn.eh_proj.weight"] = ("Q8_0", 2560, 5120)
    out, offset = {}, 0
    for name, (kind, *shape) in shapes.items():
        format = format_by_name(kind)
        out[name] = Tensor(tuple(reversed(shape)), format.type_id, b"", offset)
        offset += math.prod(shape[:-1]) * format.row_bytes(shape[-1])
    return out


def test_the_real_geometry(tmp_path):
    """75 GB of tensors: opened at once, and every place, size and hash constant as published."""
    raw = tiny_config(**REAL)
    tensors = real_tensors(49)
    path = tmp_path / "real.gguf"
    path.write_bytes(encode(tiny_metadata(raw, mtp=True), tensors))
    os.truncate(path, path.stat().st_size + (80 << 30))  # a hole: it takes no room on the disk
    started = time.perf_counter()
    file = open_gguf(path)
    config = config_of(file)
    index, rows = expert_index(file, config), row_index(file, config)
    assert time.perf_counter() - started < 2
    assert_same_config(config.replace(ngram_vocab_size_base=20_000_000), ModelConfig.from_dict(raw))
    assert (config.rotary_dim, config.num_hidden_layers, len(index.layers)) == (64, 48, 49)
    assert {layer.record_bytes for layer in index.layers} == {1_868_800}
    assert (rows.rows, rows.row_bytes, rows.width) == (320_001_536, 90, 160)
    last = index.reads(48, 511)[-1]
    assert last.offset + last.length == file.place("blk.48.nextn.eh_proj.weight").offset
    constants = hash_constants(file.metadata, config)
    hashes = NgramHash.from_config(config, 0)
    base = "model.layers.1.ple.ple_embedding"
    assert tuple(constants[f"{base}.layer_multipliers"].tolist()) == hashes.multipliers
    assert hashes.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert tuple(constants[f"{base}.ngram_heads_vocab_sizes"].tolist()) == hashes.sizes
    assert hashes.sizes[0] == 20_000_003 and hashes.sizes[-1] == 20_000_171 and hashes.rows == rows.rows


# Traps and refusals


@pytest.fixture(scope="module")
def tiny():
    raw = tiny_config()
    return tiny_metadata(raw), tiny_tensors(raw, random_weights(raw))


def changed(tmp_path: Path, tiny, tensors=None, **keys) -> GgufFile:
    """The tiny file with other values under ``qwen4exp.`` (None leaves a key out; __ stands for a dot)."""
    metadata = dict(tiny[0])
    for key, value in keys.items():
        name = key.replace("__", ".")
        name = name if name.startswith(("general.", "tokenizer.")) else f"qwen4exp.{name}"
        metadata.pop(name, None)
        if value is not None:
            metadata[name] = value
    (tmp_path / "m.gguf").write_bytes(encode(metadata, tiny[1] if tensors is None else tensors))
    return open_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("ratios", [[0, 0, 0, 0], None])
def test_ratios_that_a_converter_lost(tmp_path, tiny, caplog, ratios):
    ratios = ratios and Typed("[i32]", ratios)
    with caplog.at_level(logging.WARNING):
        assert config_of(changed(tmp_path, tiny, attention__compress_ratios=ratios)).indexer_compress_ratio == 4
    assert "compress_ratios" in caplog.text
    dense = {name: tensor for name, tensor in tiny[1].items() if ".indexer." not in name}
    with pytest.raises(ConfigError, match="compress_ratios"):
        model_config(changed(tmp_path, tiny, dense, attention__compress_ratios=ratios))


@pytest.mark.parametrize("ratios", [[1, 1, 1, 4], [0, 0, 0, 4, 0], [9, 9, 9, 4]])
def test_ratios_of_layers_without_attention_do_not_count(tmp_path, tiny, caplog, ratios):
    file = changed(tmp_path, tiny, attention__compress_ratios=Typed("[i32]", ratios))
    assert config_of(file).indexer_compress_ratio == 4 and not caplog.records


def test_other_ways_to_say_the_same(tmp_path, tiny):
    want = config_of(changed(tmp_path, tiny))
    for keys in (
        {"attention__recurrent_layers": None, "full_attention_interval": 4},
        {"attention__head_count_kv": [0, 0, 0, 2]},
        {"tokenizer__ggml__eos_token_id": 127},
        {"expert_gating_func": 1, "expert_weights_scale": 1.0, "expert_weights_norm": True},
        {"rope__scaling__type": "none"},
        {"ple__layer_multipliers": Typed("[u64]", [*tiny[0]["qwen4exp.ple.layer_multipliers"].value, 5])},
    ):
        assert config_of(changed(tmp_path, tiny, **keys)) == want, keys
    assert config_of(changed(tmp_path, tiny, tokenizer__ggml__eos_token_id=5)).eos_token_ids == (127, 5)


def test_awkward_rotary_dims():
    """The product that the configuration computes is rounded down."""
    for head_dim in range(2, 300):
        for dims in range(2, head_dim + 1, 2):
            metadata = {"qwen4exp.rope.dimension_count": dims, "qwen4exp.rope.freq_base": 1e7}
            assert int(head_dim * _rope(metadata, head_dim)["partial_rotary_factor"]) == dims, (head_dim, dims)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general__architecture": "llama"}, "'llama'; supported: qwen4exp"),
        ({"general__architecture": None}, "general.architecture is None"),
        ({"block_count": None}, "block_count is None"),
        ({"block_count": 2**31}, "recurrent_layers has 4 entries"),
        ({"block_count": 2**31, "attention__recurrent_layers": None, "full_attention_interval": 4}, "65536"),
        ({"block_count": "4"}, "block_count is '4'"),
        ({"block_count": 4.0}, "block_count is 4.0"),
        ({"nextn_predict_layers": 2}, "nextn_predict_layers is 2"),
        ({"full_attention_interval": None, "attention__recurrent_layers": None}, "full_attention_interval is None"),
        ({"attention__recurrent_layers": "abc"}, "recurrent_layers is 'abc'"),
        ({"attention__compress_ratios": Typed("[i32]", [-4] * 4)}, "compress_ratios"),
        ({"attention__head_count_kv": [1, 0, 0, 2]}, "head_count_kv differs"),
        ({"attention__value_length": 16}, "value_length is 16"),
        ({"ssm__inner_size": 97}, "inner_size is 97"),
        ({"ssm__time_step_rank": 0}, "0 value heads"),
        ({"rope__freq_base": "1"}, "freq_base is '1'"),
        ({"rope__freq_base": float("nan")}, "rope_theta"),
        ({"rope__dimension_count": 33}, "partial_rotary_factor"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "rope.scaling.type is 'yarn'"),
        ({"attention__key_length": 0, "attention__value_length": 0}, "partial_rotary_factor|head_dim"),
        ({"expert_gating_func": 2}, "expert_gating_func is 2"),
        ({"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
        ({"expert_used_count": 9}, "num_experts_per_tok"),
        ({"ple__layers": [1, 2]}, "ple.layers is"),
        ({"ple__layers": [3]}, "ple_layer_ids names layer 4"),
        ({"ple__ngram_size": 2**32 - 1}, "head_vocab_sizes has 8 entries"),
        ({"ple__head_vocab_sizes": Typed("[u64]", [2**63] * 8)}, "per_layer_token_embd.weight has"),
        ({"ple__eos_token_id": 500}, "eos_token_id"),
        ({"embedding_length_per_layer_input": None}, "embedding_length_per_layer_input is None"),
    ],
    ids=str,
)
def test_metadata_that_cannot_be_run(tmp_path, tiny, keys, message):
    with pytest.raises(ConfigError, match=message) as caught:
        config_of(changed(tmp_path, tiny, **keys))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_multipliers_beyond_int64(tmp_path, tiny):
    file = changed(tmp_path, tiny, ple__layer_multipliers=Typed("[u64]", [2**63, 1, 1]))
    with pytest.raises(ConfigError, match="layer_multipliers"):
        hash_constants(file.metadata, config_of(file))


@pytest.mark.parametrize("name", ["token_embd.weight", "per_layer_token_embd.weight"])
def test_tensors_that_the_configuration_needs(tmp_path, tiny, name):
    tensors = {key: tensor for key, tensor in tiny[1].items() if key != name}
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        model_config(changed(tmp_path, tiny, tensors))


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.5.attn_q.weight", "blk.0.attn_q.bias", "blk.1.nextn.enorm.weight"]
)
def test_unknown_tensors_are_named(tmp_path, tiny, name):
    file = changed(tmp_path, tiny, {**tiny[1], name: tiny[1]["blk.3.attn_q.weight"]}, nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=rf"'{name}' has no place"):
        recipes(file.tensors, config_of(file))


def test_half_a_pair_and_two_layouts(tmp_path, tiny):
    file = changed(tmp_path, tiny, {n: t for n, t in tiny[1].items() if n != "blk.2.ffn_up_exps.weight"})
    with pytest.raises(ConfigError, match=r"blk.2.ffn_up_exps.weight is missing"):
        recipes(file.tensors, config_of(file))
    with pytest.raises(FileFormatError, match=r"m.gguf.*blk.2.ffn_up_exps.weight' is missing"):
        expert_index(file, config_of(file))
    both = {**tiny[1], "blk.2.ffn_gate_up_exps.weight": tiny[1]["blk.2.ffn_up_exps.weight"]}
    file = changed(tmp_path, tiny, both)
    with pytest.raises(ConfigError, match=r"layers.2.mlp.experts.gate_up_proj.weight is in the file twice"):
        recipes(file.tensors, config_of(file))


def test_shapes_that_do_not_fit(tmp_path, tiny):
    def swapped(name: str, other: str) -> GgufFile:
        return changed(tmp_path, tiny, {**tiny[1], name: tiny[1][other]})

    file = swapped("blk.0.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight")
    with pytest.raises(FileFormatError, match=r"ffn_up_exps.weight' has shape"):
        expert_index(file, config_of(file))
    file = changed(tmp_path, tiny, embedding_length_per_layer_input=16)
    with pytest.raises(FileFormatError, match=r"per_layer_token_embd.weight' has shape"):
        row_index(file, config_of(file))
    file = swapped("blk.3.indexer.k_proj.weight", "blk.0.ffn_down_exps.weight")
    with pytest.raises(ConfigError, match=r"index_qk_proj.weight: .*do not fit"):
        weights_of(file)


def test_decays_of_the_wrong_sign(tmp_path, tiny):
    file = changed(tmp_path, tiny, {**tiny[1], "blk.0.ssm_a": tiny[1]["blk.0.ssm_dt.bias"]})
    with pytest.raises(ConfigError, match=r"A_log: blk.0.ssm_a"):
        weights_of(file)
