"""Loading: every layout that people have gives the same model, and what does not fit is refused by name."""

from __future__ import annotations

import itertools
import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from checkpoints import fuse_experts, random_weights, tiny_config, tokens, with_prefix, write
from mlx_moe import generate_tokens, load, load_model, quantize_model, runtime, save_model
from mlx_moe.config import ConfigError, ModelConfig
from mlx_moe.formats.hub import resolve
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.models.qwen4_exp.sanitize import canonical_name, detect_norm_convention, is_norm, sanitize
from mlx_moe.paging.ngram import NgramHash
from mlx_moe.runtime import named_parameters, packed_modules

EXPERTS = tiny_config()["text_config"]["num_experts"]
IDS = tokens(14)
DTYPES = {"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return random_weights(tiny_config(), mtp=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, weights) -> Path:
    """The reference: one float32 file, per-expert names."""
    return write(tmp_path_factory.mktemp("plain"), tiny_config(), weights)


@pytest.fixture(scope="module")
def references(plain, weights, tmp_path_factory) -> dict[str, mx.array]:
    """Float32 logits of the weights as they are, and of the weights rounded to each shorter type."""
    out = {"F32": logits(load_model(plain, mx.float32)[0])}
    for name in ("BF16", "F16"):
        folder = write(tmp_path_factory.mktemp(name), tiny_config(), rounded(weights, DTYPES[name]))
        out[name] = logits(load_model(folder, mx.float32)[0])
    return out


@pytest.fixture(scope="module")
def reference(references) -> mx.array:
    return references["F32"]


def logits(model, ids: np.ndarray = IDS) -> mx.array:
    out = model(mx.array(ids)[None])
    mx.eval(out)
    return out


def greedy(model, count: int = 12) -> list[int]:
    return [token for token, _ in generate_tokens(IDS.tolist(), model, max_tokens=count)]


def assert_same(got: mx.array, want: mx.array, what: str) -> None:
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, not {want.dtype}"
    worst = mx.abs(got.astype(mx.float32) - want.astype(mx.float32)).max().item()
    assert mx.array_equal(got, want).item(), f"{what}: logits differ by up to {worst:.2e}"
    assert want.astype(mx.float32).std().item() > 0.05, "the reference says nothing"


def refusal(folder: Path | str, kind: type[Exception] | tuple[type[Exception], ...], **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        load_model(folder, **kwargs)
    message = str(caught.value)
    assert message and "\n" not in message, f"not one line: {message!r}"
    assert len(message) < 1000, message
    return message


def rounded(weights: dict[str, np.ndarray], dtype: mx.Dtype) -> dict[str, np.ndarray]:
    return {name: np.array(mx.array(value).astype(dtype).astype(mx.float32)) for name, value in weights.items()}


# Layouts


@pytest.mark.sample(4)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", ["per-expert", "fused"])
def test_layouts_give_the_same_model(tmp_path, weights, references, experts, dtype, prefix, files):
    stored = fuse_experts(weights, EXPERTS) if experts == "fused" else weights
    stored = stored if prefix == "model." else with_prefix(stored)
    folder = write(tmp_path / "stored", tiny_config(), stored, DTYPES[dtype], files)
    model, _ = load_model(folder, mx.float32)
    assert_same(logits(model), references[dtype], f"{experts} {dtype} {prefix} in {files} file(s)")
    assert model.has_mtp


def test_the_reference_needs_every_weight(plain, weights):
    """All tensors of a checkpoint are in the model, under the names that ``canonical_name`` says."""
    want = {canonical_name(name) for name in weights}
    assert set(named_parameters(load_model(plain)[0])) == want


def test_mlx_lm_names(tmp_path, weights, reference):
    stored: dict[str, np.ndarray] = {}
    for name, value in weights.items():
        if match := re.match(r"(.*\.mlp)\.experts\.0\.(gate|up|down)_proj\.weight$", name):
            parts = [weights[name.replace(".experts.0.", f".experts.{e}.")] for e in range(EXPERTS)]
            stored[f"{match[1]}.switch_mlp.{match[2]}_proj.weight"] = np.stack(parts)
        elif ".mlp.experts." not in name:
            stored[name] = value
    stored = {f"language_model.{name}": value for name, value in stored.items()}
    assert any(name.startswith("language_model.model.layers.0.mlp.switch_mlp") for name in stored)
    model, _ = load_model(write(tmp_path, tiny_config(), stored), mx.float32)
    assert_same(logits(model), reference, "mlx-lm's names")
    assert model.has_mtp


@pytest.mark.parametrize("shape", ["C1K", "CK1", "CK"])
def test_convolution_kernels(tmp_path, weights, reference, shape):
    stored = dict(weights)
    for name in [name for name in weights if name.endswith("conv1d.weight")]:
        kernel = weights[name][:, 0]
        stored[name] = {"C1K": kernel[:, None], "CK1": kernel[:, :, None], "CK": kernel}[shape]
    model, _ = load_model(write(tmp_path, tiny_config(), stored), mx.float32)
    assert_same(logits(model), reference, shape)


def test_without_the_mtp_layer(tmp_path, weights, reference):
    stored = {name: value for name, value in weights.items() if not name.startswith("mtp.")}
    model, _ = load_model(write(tmp_path, tiny_config(), stored), mx.float32)
    assert not model.has_mtp
    assert_same(logits(model), reference, "without MTP")


def test_vision_tensors_are_skipped_with_one_warning(tmp_path, weights, reference, caplog):
    image = {f"model.visual.blocks.{i}.attn.qkv.weight": np.ones((4, 4), np.float32) for i in range(5)}
    image |= {"visual.patch_embed.proj.weight": np.ones((2, 2), np.float32)}
    folder = write(tmp_path, tiny_config(), with_prefix(weights) | image)
    with caplog.at_level(logging.WARNING):
        model, _ = load_model(folder, mx.float32)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1, warnings
    assert " 6 tensors of the image encoder" in warnings[0]
    assert_same(logits(model), reference, "with vision tensors")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load_model(write(tmp_path / "text", tiny_config(), weights))
    assert not caplog.records, "a text-only file needs no warning"


# FP8


def as_fp8_type(path: Path) -> None:
    """Give the uint8 tensors of a file the type that published FP8 files name; MLX cannot write it."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].replace(b'"U8"', b'"F8_E4M3"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])


def fp8_blocks(weight: np.ndarray) -> tuple[mx.array, mx.array, np.ndarray]:
    """(FP8 bytes, scale per 128 x 128 block, the exact float32 values that these stand for)."""
    rows, columns = weight.shape
    grid = -(-rows // 128), -(-columns // 128)
    scale, spread = np.zeros(grid, np.float32), np.zeros_like(weight)
    for i in range(grid[0]):
        for j in range(grid[1]):
            block = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            scale[i, j] = np.abs(weight[block]).max() / 448 * (1 + 0.3 * i + 0.7 * j)
            spread[block] = scale[i, j]
    packed = mx.to_fp8(mx.array(weight / spread))
    return packed, mx.array(scale), np.array(mx.from_fp8(packed, dtype=mx.float32)) * spread


def fp8_checkpoint(raw: dict[str, Any], scale_type: mx.Dtype) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Weights as in published FP8 files, and the same values in float32."""
    weights = random_weights(raw, seed=3, mtp=True)
    stored: dict[str, Any] = dict(weights)
    for name, value in weights.items():
        if ".mlp.experts." in name:
            stored[name], stored[f"{name}_scale_inv"], weights[name] = fp8_blocks(value)
    shards = [name for name in weights if ".ngram_embedding.shard_" in name]
    scale = mx.array(max(np.abs(weights[name]).max() for name in shards) / 448).astype(scale_type)
    stored[shards[0].split(".shard_")[0] + ".weight_scale"] = scale
    for name in shards:
        stored[name] = mx.to_fp8(mx.array(weights[name] / scale.astype(mx.float32).item()))
        weights[name] = np.array(mx.from_fp8(stored[name], dtype=mx.float32) * scale.astype(mx.float32))
    return stored, weights


@pytest.mark.sample(1)
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 192, "moe_intermediate_size": 160, "ple_embed_dim": 64},  # 1.5 and 1.25 blocks
        {"hidden_size": 384, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},  # 3 and less
    ],
)
def test_fp8_is_its_dequantised_values(tmp_path, changes, prefix):
    raw = tiny_config(**changes)
    stored, values = fp8_checkpoint(raw, mx.float32 if prefix == "model." else mx.bfloat16)
    exact, _ = load_model(write(tmp_path / "exact", raw, values), mx.float32)
    marked = {**raw, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    folder = write(tmp_path / "fp8", marked, stored if prefix == "model." else with_prefix(stored), files=2)
    for path in folder.glob("*.safetensors"):
        as_fp8_type(path)
    model, config = load_model(folder, mx.float32)
    assert_same(logits(model), logits(exact), "FP8")
    save_model(tmp_path / "again", model, config)
    again, config = load_model(tmp_path / "again", mx.float32)
    assert "quantization_config" not in config, "the saved weights are not FP8 any more"
    assert_same(logits(again), logits(exact), "FP8, saved and loaded")


def test_fp8_without_its_scale_is_refused(tmp_path):
    """The bytes must not be taken for numbers from 0 to 255."""
    raw = tiny_config()
    stored, _ = fp8_checkpoint(raw, mx.float32)
    name = next(name for name in stored if name.endswith(".5.up_proj.weight_scale_inv"))
    lacking = {key: value for key, value in stored.items() if key != name}
    assert name.removesuffix("_scale_inv") in refusal(
        write(tmp_path / "a", raw, lacking), (ConfigError, FileFormatError)
    )
    table = next(name for name in stored if name.endswith("ngram_embedding.weight_scale"))
    lacking = {key: value for key, value in stored.items() if key != table}
    assert "ngram_embedding" in refusal(write(tmp_path / "b", raw, lacking), (ConfigError, FileFormatError))


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (3,), (1, 1, 2), (0,)])
def test_fp8_with_scales_of_another_shape_is_refused(tmp_path, shape):
    raw = tiny_config()
    stored, _ = fp8_checkpoint(raw, mx.float32)
    name = next(name for name in stored if name.endswith(".weight_scale_inv"))
    folder = write(tmp_path, raw, {**stored, name: mx.ones(shape)})
    assert name.removesuffix("_scale_inv") in refusal(folder, (ConfigError, FileFormatError))


def test_numbers_that_are_no_weights_are_refused(tmp_path, weights):
    for name in ("lm_head.weight", "model.layers.0.linear_attn.A_log", "model.layers.0.mlp.gate.weight"):
        folder = write(tmp_path / name, tiny_config(), {**weights, name: weights[name].astype(np.int32)})
        assert name in refusal(folder, (ConfigError, FileFormatError))


# Hash constants of the n-gram table


def hash_constants(raw: dict[str, Any]) -> dict[str, mx.array]:
    table = NgramHash.from_config(ModelConfig.from_dict(raw), 0)
    base = "model.layers.1.ple.ple_embedding"
    return {
        f"{base}.layer_multipliers": mx.array(table.multipliers, dtype=mx.int64),
        f"{base}.ngram_heads_vocab_sizes": mx.array(table.sizes, dtype=mx.int64),
        f"{base}.ngram_heads_offsets": mx.array(table.offsets, dtype=mx.int64),
    }


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_hash_constants_that_agree(tmp_path, weights, reference, prefix):
    stored = weights | hash_constants(tiny_config())
    model, _ = load_model(write(tmp_path, tiny_config(), stored if prefix == "model." else with_prefix(stored)))
    assert_same(logits(model), reference, "with hash constants")


@pytest.mark.parametrize("name", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"])
def test_hash_constants_that_differ(tmp_path, weights, name):
    constants = hash_constants(tiny_config())
    key = next(key for key in constants if key.endswith(name))
    for i, other in enumerate((constants[key] + 1, constants[key][:-1], constants[key][0], constants[key][None])):
        folder = write(tmp_path / str(i), tiny_config(), weights | {**constants, key: other})
        message = refusal(folder, ConfigError)
        assert name in message and "seed" in message


def test_hash_constants_of_another_seed(tmp_path, weights):
    folder = write(tmp_path, tiny_config(seed=99), weights | hash_constants(tiny_config()))
    assert "layer_multipliers" in refusal(folder, ConfigError)


@pytest.mark.parametrize("base", ["model.layers.0.ple", "x.y.z", "model.layers.x.ple", "a"])
def test_hash_constants_of_no_layer(tmp_path, weights, base):
    stored = weights | {f"{base}.ple_embedding.layer_multipliers": mx.array([1, 3, 5])}
    assert "layer_multipliers" in refusal(write(tmp_path, tiny_config(), stored), (ConfigError, FileFormatError))


# sanitize


def stored_forms(weights: dict[str, np.ndarray]) -> dict[str, dict[str, mx.array]]:
    fp8, _ = fp8_checkpoint(tiny_config(), mx.float32)
    forms = {"plain": weights, "fused": with_prefix(fuse_experts(weights, EXPERTS)), "fp8": fp8}
    forms["hash"] = weights | hash_constants(tiny_config())
    return {
        form: {name: value if isinstance(value, mx.array) else mx.array(value) for name, value in stored.items()}
        for form, stored in forms.items()
    }


@pytest.mark.parametrize("form", ["plain", "fused", "fp8", "hash"])
@pytest.mark.parametrize("convention", ["auto", "folded"])
def test_sanitize_is_idempotent_and_pure(weights, form, convention):
    config, stored = ModelConfig.from_dict(tiny_config()), stored_forms(weights)[form]
    names, before = list(stored), {name: np.array(value) for name, value in stored.items()}
    once = sanitize(stored, config, convention)
    twice = sanitize(once, config, convention)
    assert set(once) == set(twice)
    for name in once:
        assert once[name].dtype == twice[name].dtype and mx.array_equal(once[name], twice[name]).item(), name
    assert list(stored) == names, "the input was changed"
    for name, value in before.items():
        assert np.array_equal(np.array(stored[name]), value), f"{name} was changed"
    assert set(once) == {canonical_name(name) for name in stored if "ple_embedding.layer" not in name and
                         "ple_embedding.ngram_heads" not in name}  # fmt: skip


@pytest.mark.parametrize("form", ["plain", "fused", "fp8", "hash"])
def test_saved_models_load_as_they_were(tmp_path, weights, form):
    model, raw = load_model(write(tmp_path / "a", tiny_config(), stored_forms(weights)[form]), mx.float32)
    save_model(tmp_path / "b", model, raw)
    again, _ = load_model(tmp_path / "b")
    assert_same(logits(again), logits(model), "saved and loaded")


# Norm conventions


def folded(weights: dict[str, np.ndarray], choose=lambda name: True) -> dict[str, np.ndarray]:
    return {name: value + 1 if is_norm(name) and choose(name) else value for name, value in weights.items()}


def test_raw_and_folded_files_give_the_same_text(tmp_path, plain, weights, reference):
    model, _ = load_model(write(tmp_path, tiny_config(), folded(weights)), mx.float32)
    assert_same(logits(model), reference, "folded")
    assert greedy(model) == greedy(load_model(plain, mx.float32)[0])


@pytest.mark.parametrize("form", ["raw", "folded"])
def test_convention_of_bf16_files(tmp_path, weights, form):
    stored = weights if form == "raw" else folded(weights)
    model, _ = load_model(write(tmp_path, tiny_config(), stored, mx.bfloat16))
    mean = named_parameters(model)["model.layers.0.mlp_hyper_connection.hc_norm.weight"].mean().item()
    assert abs(mean - 1) < 0.1, f"factors of mean {mean:.2f}"


MIXTURES = {
    "half of the layers": lambda name: name.startswith(("model.layers.0.", "model.layers.1.")),
    "one layer": lambda name: name.startswith("model.layers.2."),
    "one kind": lambda name: ".attn_hyper_connection.hc_norm." in name,
    "the n-gram layer": lambda name: ".ple." in name,
    "MTP only": lambda name: name.startswith("mtp."),
    "all but MTP": lambda name: not name.startswith("mtp."),
    "a single norm": lambda name: name == "model.layers.1.mlp_hyper_connection.hc_norm.weight",
    "all but a single norm": lambda name: name != "model.layers.1.mlp_hyper_connection.hc_norm.weight",
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixed_conventions_are_refused(tmp_path, weights, mixture):
    folder = write(tmp_path, tiny_config(), folded(weights, MIXTURES[mixture]))
    assert "norm" in refusal(folder, ConfigError)


def test_one_odd_norm_among_several_attention_layers(tmp_path):
    raw = tiny_config(num_hidden_layers=6, layer_types=["linear_attention"] * 2 + ["full_attention"] * 4)
    stored = folded(random_weights(raw), lambda name: name == "model.layers.4.self_attn.q_norm.weight")
    assert "model.layers.4.self_attn.q_norm" in refusal(write(tmp_path, raw, stored), ConfigError)


def synthetic_norms(layers: int, seed: int = 0, means: tuple[float, float] = (-0.1, 0.35)) -> dict[str, mx.array]:
    """Raw norm weights of a deep model with an MTP layer, their means as varied as those of trained ones."""
    rng = np.random.default_rng(seed)
    sizes = {f"model.layers.{i}.{kind}_hyper_connection.hc_norm.weight": 256 for i in range(layers) for kind in KINDS}
    sizes |= {f"model.layers.{i}.self_attn.{x}_norm.weight": 32 for i in range(3, layers, 4) for x in "qk"}
    sizes |= {f"mtp.layers.0.{kind}_hyper_connection.hc_norm.weight": 256 for kind in KINDS}
    sizes |= {"mtp.pre_fc_norm_hidden.weight": 256, "mtp.pre_fc_norm_embedding.weight": 64}
    return {
        name: mx.array(rng.normal(rng.uniform(*means), 0.1, size).astype(np.float32)) for name, size in sizes.items()
    }


KINDS = ("attn", "mlp")
DEEP = 48


@pytest.mark.parametrize("verdict", ["raw", "folded"])
@pytest.mark.parametrize("seed", range(5))
def test_trained_variation_is_no_mixture(verdict, seed):
    norms = {name: tensor + (verdict == "folded") for name, tensor in synthetic_norms(DEEP, seed).items()}
    assert detect_norm_convention(norms) == verdict


@pytest.mark.parametrize("verdict", ["raw", "folded"])
@pytest.mark.parametrize(
    ("part", "means"),
    [
        ("mtp.", (-0.1, 0.35)),
        ("model.layers.0.attn_hyper", (0.1, 0.25)),
        ("model.layers.7.self_attn.q_norm", (0.1, 0.25)),
    ],
)
def test_a_small_part_of_a_deep_model_is_noticed(verdict, part, means):
    """The MTP layer is 2 % of the weights, one norm much less; that is noticed where its kind varies little."""
    norms = synthetic_norms(DEEP, means=means)
    norms = {name: tensor + (name.startswith(part) == (verdict == "raw")) for name, tensor in norms.items()}
    with pytest.raises(ConfigError, match=re.escape(part)):
        detect_norm_convention(norms)


def test_norms_between_the_conventions_are_refused(tmp_path, weights):
    stored = {name: value + 0.6 if is_norm(name) else value for name, value in weights.items()}
    folder = write(tmp_path, tiny_config(), stored)
    assert "norm_convention" in refusal(folder, ConfigError), "the remedy is not named"
    model, _ = load_model(folder, norm_convention="folded")
    weight = named_parameters(model)["model.hyper_connection_mixer.hc_norm.weight"]
    assert np.array_equal(np.array(weight), stored["model.hyper_connection_mixer.hc_norm.weight"])


def test_the_override_wins(tmp_path, plain, weights):
    name = "model.hyper_connection_mixer.hc_norm.weight"
    for convention, add in (("raw", 1), ("folded", 0)):
        model, _ = load_model(plain, mx.float32, norm_convention=convention)
        assert np.array_equal(np.array(named_parameters(model)[name]), weights[name] + np.float32(add)), convention
        by_file = write(tmp_path / convention, {**tiny_config(), "norm_convention": convention}, weights)
        model, _ = load_model(by_file)
        assert np.array_equal(np.array(named_parameters(model)[name]), weights[name] + np.float32(add)), convention
    model, _ = load_model(by_file, norm_convention="raw")
    assert np.array_equal(np.array(named_parameters(model)[name]), weights[name] + np.float32(1)), "argument over file"


@pytest.mark.parametrize("convention", ["", "Raw", 5, None, ["raw"]])
def test_unknown_conventions_are_refused(plain, convention):
    assert "norm_convention" in refusal(plain, ConfigError, norm_convention=convention)


# What does not fit


def test_missing_tensors(tmp_path, weights):
    gone = ["lm_head.weight", "model.embed_tokens.weight", *(f"model.layers.{i}.mlp.gate.weight" for i in range(4))]
    folder = write(tmp_path, tiny_config(), {name: value for name, value in weights.items() if name not in gone})
    message = refusal(folder, FileFormatError)
    assert "6 tensor(s) missing" in message
    assert "lm_head.weight" in message and "model.embed_tokens.weight" in message and str(folder) in message


def test_surplus_tensors_name_the_file(tmp_path, weights):
    surplus = {f"model.layers.9.strange_{i}.weight": np.ones((2, 2), np.float32) for i in range(4)}
    folder = write(tmp_path, tiny_config(), weights | surplus)
    message = refusal(folder, FileFormatError)
    assert "4 unknown tensor(s)" in message and "model.layers.9.strange_0.weight" in message
    assert "model.safetensors" in message


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.0.linear_attn.A_log",
        "model.layers.1.ple.conv1d.weight",
        "mtp.fc_hidden.weight",
    ],
)
@pytest.mark.parametrize("change", ["short", "flat", "deep", "empty"])
def test_misshapen_tensors_name_the_tensor_and_its_file(tmp_path, weights, name, change):
    value = weights[name]
    other = {"short": value[1:], "flat": value.reshape(-1)[:-1], "deep": value[None, None], "empty": value[:0]}[change]
    folder = write(tmp_path, tiny_config(), {**weights, name: other}, files=3)
    message = refusal(folder, FileFormatError, norm_convention="raw")
    assert name in message and str(weights[name].squeeze().shape) in message, message
    held = next(p.name for p in folder.glob("*.safetensors") if name in mx.load(str(p)))
    assert held in message, message


@pytest.mark.parametrize("part", ["gate", "up", "down"])
@pytest.mark.parametrize("which", ["one", "all"])
def test_misshapen_experts(tmp_path, weights, part, which):
    ending = rf"model\.layers\.1\.mlp\.experts\.{'5' if which == 'one' else '[0-9]+'}\.{part}_proj\.weight$"
    stored = {name: value[1:] if re.match(ending, name) else value for name, value in weights.items()}
    message = refusal(write(tmp_path, tiny_config(), stored), (ConfigError, FileFormatError))
    assert "model.layers.1.mlp.experts" in message and part in message, message


def test_misshapen_shards(tmp_path, weights):
    name = next(name for name in weights if ".shard_2." in name)
    folder = write(tmp_path / "a", tiny_config(), {**weights, name: weights[name][:, 1:]})
    assert "ngram_embedding" in refusal(folder, (ConfigError, FileFormatError))
    folder = write(tmp_path / "b", tiny_config(), {**weights, name: weights[name][1:]})
    assert "ngram_embedding" in refusal(folder, (ConfigError, FileFormatError))


@pytest.mark.parametrize("gone", [0, 2, 3])
def test_missing_shards(tmp_path, weights, gone):
    stored = {name: value for name, value in weights.items() if f".shard_{gone}." not in name}
    message = refusal(write(tmp_path, tiny_config(), stored), (ConfigError, FileFormatError))
    assert "ngram_embedding" in message, message


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_missing_experts(tmp_path, weights, part):
    name = f"model.layers.2.mlp.experts.6.{part}_proj.weight"
    folder = write(tmp_path / "one", tiny_config(), {key: value for key, value in weights.items() if key != name})
    message = refusal(folder, ConfigError)
    assert "model.layers.2.mlp.experts" in message and "expert 6 is missing" in message
    every = re.compile(rf"model\.layers\.2\.mlp\.experts\.\d+\.{part}_proj\.weight")
    folder = write(tmp_path / "all", tiny_config(), {k: v for k, v in weights.items() if not every.match(k)})
    assert "model.layers.2.mlp.experts" in refusal(folder, (ConfigError, FileFormatError))


def test_more_experts_than_the_configuration_names(tmp_path, weights):
    extra = {
        f"model.layers.0.mlp.experts.8.{part}_proj.weight": weights[f"model.layers.0.mlp.experts.0.{part}_proj.weight"]
        for part in ("gate", "up", "down")
    }
    assert "num_experts is 8" in refusal(write(tmp_path, tiny_config(), weights | extra), ConfigError)


def test_one_tensor_under_two_names(tmp_path, weights):
    twice = {"model.language_model.embed_tokens.weight": weights["model.embed_tokens.weight"] * 2}
    message = refusal(write(tmp_path / "a", tiny_config(), weights | twice), (ConfigError, FileFormatError))
    assert "model.embed_tokens.weight" in message
    fused = fuse_experts(weights, EXPERTS)
    both = weights | {name: value for name, value in fused.items() if ".mlp.experts." in name}
    message = refusal(write(tmp_path / "b", tiny_config(), both), (ConfigError, FileFormatError))
    assert ".mlp.experts" in message


def test_a_truncated_file_is_named(tmp_path, weights):
    folder = write(tmp_path, tiny_config(), weights, files=3)
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model-00002-of-00003.safetensors" in refusal(folder, FileFormatError)


def test_names_that_lead_nowhere(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in (
        tmp_path / "nothing",
        "/no/such/folder",
        "no/such/folder/here",
        "nobody/no-such-model-4711",
        "~nobody4711/x",
    ):
        for call in (load_model, load, resolve):
            with pytest.raises(FileNotFoundError) as caught:
                call(name)
            assert str(name) in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "file.bin").write_bytes(b"GGUF")
    assert "is a file" in refusal(tmp_path / "file.bin", FileNotFoundError)


def test_a_folder_without_a_configuration(tmp_path):
    assert "config.json" in refusal(tmp_path, ConfigError)


def test_configuration_overrides(plain, reference):
    model, raw = load_model(plain, model_config={"norm_convention": "raw"})
    assert raw["norm_convention"] == "raw"
    assert_same(logits(model), reference, "override")
    message = refusal(
        plain, ConfigError, model_config={"text_config": {**tiny_config()["text_config"], "num_experts": 0}}
    )
    assert "num_experts" in message


def test_a_model_without_a_tokenizer(plain):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load(plain)


# Types


@pytest.mark.sample(6)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("asked", [None, *DTYPES])
@pytest.mark.parametrize("cpu", [True, False])
def test_types_to_compute_in(tmp_path, weights, monkeypatch, stored, asked, cpu):
    monkeypatch.setattr(runtime, "on_cpu", lambda: cpu)
    folder = write(tmp_path, tiny_config(), weights, DTYPES[stored])
    model, _ = load_model(folder, dtype=DTYPES.get(asked))
    want = DTYPES[asked or stored] if asked or not cpu else mx.float32
    assert logits(model).dtype == want, "the type asked for, else the file's, else float32 on the CPU"
    types = {name: value.dtype for name, value in named_parameters(model).items()}
    kept = {name for name in types if is_norm(name) or name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight"))}
    assert {types[name] for name in kept} == {mx.float32}, "norms and decays stay float32"
    assert {types[name] for name in types.keys() - kept} == {want}


@pytest.mark.parametrize("dtype", [mx.int8, mx.uint32, mx.bool_, mx.complex64, "float32", 32])
def test_types_that_cannot_be_computed_in(plain, dtype):
    assert "allowed: float32, bfloat16, float16" in refusal(plain, ValueError, dtype=dtype)


# Packed weights

PACKINGS = [
    *({"bits": bits, "group_size": size, "mode": "affine"} for bits in (2, 3, 4, 6, 8) for size in (32, 64)),
    {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    {"bits": 4, "group_size": 16, "mode": "nvfp4"},
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("dtype", "packing"),
    [("F32", packing) for packing in PACKINGS] + [("BF16", packing) for packing in PACKINGS[4:5] + PACKINGS[-3:]],
    ids=lambda value: value if isinstance(value, str) else f"{value['mode']}-{value['bits']}-{value['group_size']}",
)
def test_packed_models_load_as_they_were_saved(tmp_path, plain, reference, packing, dtype):
    model, raw = load_model(plain, DTYPES[dtype])
    quantize_model(model, **packing)
    packed = [path for path, module in packed_modules(model) if module.packing is not None]
    assert len(packed) > 20, "hardly anything was packed"
    assert not any(path.endswith(("mlp.gate", "shared_expert_gate")) for path in packed), "routers stay as they are"
    want = logits(model)
    assert not mx.array_equal(want.astype(mx.float32), reference).item(), "packing changed nothing"
    save_model(tmp_path, model, raw)
    again, config = load_model(tmp_path, None if dtype == "F32" else DTYPES[dtype])
    assert config["quantization"]["bits"] == packing["bits"]
    assert_same(logits(again), want, f"{packing}")
    assert {p: m.packing for p, m in packed_modules(again)} == {p: m.packing for p, m in packed_modules(model)}
    assert config["dtype"] == {"F32": "float32", "BF16": "bfloat16"}[dtype], "the file must say what it computes in"


def test_a_packed_model_in_another_type(tmp_path, plain):
    model, raw = load_model(plain, mx.float32)
    save_model(tmp_path, quantize_model(model), raw)
    other, _ = load_model(tmp_path, mx.bfloat16)
    got, want = logits(other), logits(model)
    assert got.dtype == mx.bfloat16
    assert mx.abs(got.astype(mx.float32) - want).mean().item() < 0.2 * want.std().item()


def test_mixed_packing(tmp_path, plain):
    model, raw = load_model(plain, mx.float32)

    def choose(path, module):
        if path == "lm_head":
            return {"bits": 8, "group_size": 32, "mode": "affine"}
        if ".experts." in path:
            return {"bits": 4, "group_size": 32, "mode": "mxfp4"} if ".down_proj" in path else True
        return "self_attn" in path

    quantize_model(model, bits=3, group_size=64, predicate=choose)
    packings = {path: module.packing for path, module in packed_modules(model)}
    assert packings["lm_head"]["bits"] == 8
    assert packings["model.layers.0.mlp.experts.down_proj"]["mode"] == "mxfp4"
    assert packings["model.layers.0.mlp.experts.gate_up_proj"]["bits"] == 3
    assert packings["model.embed_tokens"] is None
    want = logits(model)
    save_model(tmp_path, model, raw)
    again, _ = load_model(tmp_path)
    assert {path: module.packing for path, module in packed_modules(again)} == packings
    assert_same(logits(again), want, "mixed packing")


def saved(folder: Path, plain: Path, **packing: Any) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Configuration and tensors of a packed model, saved in ``folder``."""
    model, raw = load_model(plain, mx.float32)
    save_model(folder, quantize_model(model, **packing), raw)
    return json.loads((folder / "config.json").read_text()), dict(mx.load(str(folder / "model.safetensors")))


def test_packed_files_without_their_section_are_refused(tmp_path, plain):
    raw, arrays = saved(tmp_path / "a", plain)
    raw.pop("quantization")
    message = refusal(write(tmp_path / "b", raw, arrays), ConfigError)
    assert ".scales" in message and "quantization" in message


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("part", "kind"),
    [
        *itertools.product(
            ["weight", "scales", "biases"], ["no columns", "a column less", "flat", "other rows", "plain", "bytes"]
        ),
        ("weight", "float"),
    ],
)
def test_misshapen_packed_tensors_are_refused(tmp_path, plain, part, kind):
    raw, arrays = saved(tmp_path / "a", plain)
    name = f"lm_head.{part}"
    value = arrays[name]
    arrays[name] = {
        "no columns": value[:, :0],
        "a column less": value[:, :-1],
        "flat": value.reshape(-1),
        "other rows": value[1:],
        "float": value.astype(mx.float32),
        "plain": mx.ones((128, 64)),
        "bytes": value.astype(mx.uint8),
    }[kind]
    assert "lm_head" in refusal(write(tmp_path / "b", raw, arrays), (ConfigError, FileFormatError))


@pytest.mark.parametrize("mode", ["affine", "mxfp8", "nvfp4"])
def test_packed_tensors_under_another_mode_are_refused(tmp_path, plain, mode):
    raw, arrays = saved(tmp_path / "a", plain, bits=4, group_size=32, mode="mxfp4")
    raw["quantization"]["mode"] = mode
    refusal(write(tmp_path / "b", raw, arrays), (ConfigError, FileFormatError))


def test_packing_that_mlx_does_not_know(plain):
    model, _ = load_model(plain)
    with pytest.raises(ValueError):
        quantize_model(model, bits=7)
    with pytest.raises(ValueError):
        quantize_model(model, mode="nf4")


# Threads


def test_load_here_generate_there(plain):
    found: dict[str, Any] = {}

    def loader():
        found["model"] = load_model(plain, mx.float32)[0]

    def generator(name):
        found[name] = greedy(found["model"])

    for target, args in ((loader, ()), (generator, ("second",)), (generator, ("third",))):
        thread = threading.Thread(target=target, args=args)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert found.get("second") and found["second"] == found.get("third") == greedy(found["model"])


def test_two_threads_at_once(plain):
    model, found = load_model(plain, mx.float32)[0], {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: greedy(model, 6)})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found.get(0) and found[0] == found.get(1)


def test_lazy_loading_in_the_loading_thread(plain, reference):
    model, _ = load_model(plain, mx.float32, lazy=True)
    assert_same(logits(model), reference, "lazy")
    assert greedy(model) == greedy(load_model(plain, mx.float32)[0])


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_packed_weights_compute_in_the_type_asked_for(tmp_path, mode, dtype):
    """mx.dequantize gives bfloat16 for the fp modes unless told otherwise; streams and caches followed it once."""
    group, bits = {"affine": (32, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}[mode]
    raw = tiny_config()
    model, config = load_model(write(tmp_path / "plain", raw, random_weights(raw)), dtype=mx.float32)
    quantize_model(model, bits=bits, group_size=group, mode=mode)
    save_model(tmp_path / "packed", model, config)
    packed, _ = load_model(tmp_path / "packed", dtype=dtype)
    ids = mx.array(tokens(40)[None])
    cache = packed.make_cache()
    logits, streams = packed.forward(ids, cache)
    assert packed.model.embed_tokens(ids).dtype == streams.dtype == logits.dtype == dtype
    assert cache[3].state[cache[3].FIELDS.index("keys")].dtype == dtype
    assert cache[0].state[cache[0].FIELDS.index("conv")].dtype == dtype
    if dtype == mx.float32:
        assert mx.abs(logits - model(ids)).max().item() == 0, "the same packed weights, quantised here and loaded"
