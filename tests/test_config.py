"""ModelConfig: every published shape is read, and everything else is refused in one line."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import time
from typing import Any

import pytest

from checkpoints import EOS, SHAPES, tiny_config
from mlx_moe.config import _INTS, _REQUIRED, FULL, LINEAR, ConfigError, ModelConfig, read_config

FUZZ = 2000


def flat_config(**changes: Any) -> dict[str, Any]:
    """The text configuration alone, as text-only saves have it."""
    return {**tiny_config(**changes)["text_config"], "model_type": "qwen4_exp_text"}


def without(name: str) -> dict[str, Any]:
    raw = tiny_config()
    raw["text_config"].pop(name, None)
    return raw


def refusal(raw: Any) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw)
    message = str(caught.value)
    assert message and "\n" not in message, f"not one line: {message!r}"
    assert len(message) < 400, f"too long to read: {message[:120]!r}…"
    return message


# Shapes that people have


@pytest.mark.parametrize("shape", SHAPES)
def test_nested_and_flat_give_the_same_configuration(shape):
    nested, flat = (
        ModelConfig.from_dict(tiny_config(**SHAPES[shape])),
        ModelConfig.from_dict(flat_config(**SHAPES[shape])),
    )
    assert nested == flat


def test_values_are_those_of_the_file():
    config = ModelConfig.from_dict(tiny_config())
    text = tiny_config()["text_config"]
    for name in _INTS:
        assert getattr(config, name) == text[name], name
    assert config.layer_types == (LINEAR, LINEAR, LINEAR, FULL)
    assert config.ple_layer_ids == (2,)
    assert (config.ple_index(0), config.ple_index(1)) == (None, 0), "ple_layer_ids counts from one"
    assert (config.rope_theta, config.rotary_dim) == (1e7, 8)
    assert config.eos_token_ids == (EOS,)
    assert config.num_blocks == 8
    assert config.conv_dim == 2 * 2 * 16 + 6 * 16
    assert config.ngram_heads == 8
    assert config.ple_conv_span == 9


def test_published_values_of_the_real_model():
    text = {
        "hidden_size": 2560, "num_hidden_layers": 48, "vocab_size": 248320, "num_attention_heads": 24,
        "num_key_value_heads": 2, "head_dim": 256, "indexer_n_heads": 4, "indexer_head_dim": 128,
        "indexer_budget": 2048, "indexer_compress_ratio": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640,
        "hc_count": 4, "hc_lowrank": 320, "ple_layer_ids": [2], "ngram_size": 3, "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000, "ple_embed_dim": 2560, "ple_conv_kernel_size": 4,
        "eos_token_id": 248044, "output_gate_type": "sigmoid", "split_ngram_parts": 128,
        "max_position_embeddings": 262144, "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    config = ModelConfig.from_dict({"model_type": "qwen4_exp", "text_config": text})
    assert config.layer_types.count(FULL) == 12
    assert config.rotary_dim == 64
    assert config.num_blocks == 512
    assert config.conv_dim == 10240


def test_the_oracle_configuration(oracle):
    config = ModelConfig.from_path(oracle / "hf")
    assert config.hidden_size == 256
    assert config.layer_types == (LINEAR, LINEAR, LINEAR, FULL)
    assert config.rotary_dim == 16
    assert config.eos_token_ids == (383,)


@pytest.mark.parametrize("name", ["full_attention", "indexed_attention"])
def test_both_names_of_the_attention_layers(name):
    config = ModelConfig.from_dict(tiny_config(layer_types=[LINEAR, name, LINEAR, name], ple_layer_ids=[1]))
    assert config.layer_types == (LINEAR, FULL, LINEAR, FULL)


def test_layer_types_from_the_interval():
    raw = tiny_config(full_attention_interval=2, ple_layer_ids=[1])  # has no layer_types
    assert ModelConfig.from_dict(raw).layer_types == (LINEAR, FULL, LINEAR, FULL)


@pytest.mark.parametrize(
    ("missing", "want"),
    [
        ("seed", 1234),
        ("norm_topk_prob", True),
        ("rms_norm_eps", 1e-6),
        ("hc_count", 4),
        ("indexer_kv_heads", 1),
        ("linear_conv_kernel_dim", 4),
        ("split_ngram_parts", 512),
        ("ple_embed_dim", 64),
        ("output_gate_type", "silu"),
        ("hidden_act", None),
        ("layer_types", (LINEAR, LINEAR, LINEAR, FULL)),
    ],
)
def test_defaults_of_what_files_leave_out(missing, want):
    config = ModelConfig.from_dict(without(missing))
    if want is not None:
        assert getattr(config, missing) == want
    null = tiny_config(**{missing: None})
    assert ModelConfig.from_dict(null) == config, "null means missing"


@pytest.mark.parametrize("name", [name for name, spec in _INTS.items() if spec[2] is _REQUIRED])
def test_required_fields_are_named_when_missing(name):
    for raw in (without(name), tiny_config(**{name: None})):
        message = refusal(raw)
        assert message.startswith(f"{name} is missing"), message


@pytest.mark.parametrize(
    ("top", "nested", "want"),
    [
        (None, 5, (5,)),
        (7, None, (7,)),
        (7, 5, (5,)),
        (None, [5, 9], (5, 9)),
        ([7, 3], None, (7, 3)),
        (None, [9, 5], (9, 5)),
        (None, 0, (0,)),
        (3, 0, (0,)),
    ],
)
def test_eos_at_either_level_and_as_number_or_list(top, nested, want):
    raw = without("eos_token_id")
    if top is not None:
        raw["eos_token_id"] = top
    if nested is not None:
        raw["text_config"]["eos_token_id"] = nested
    assert ModelConfig.from_dict(raw).eos_token_ids == want


def test_eos_may_be_missing_without_an_ngram_table():
    raw = without("eos_token_id")
    assert "eos_token_id" in refusal(raw)
    raw["text_config"]["ple_layer_ids"] = []
    assert ModelConfig.from_dict(raw).eos_token_ids == ()


@pytest.mark.parametrize("ids", [None, []])
def test_no_ple_layers(ids):
    assert ModelConfig.from_dict(tiny_config(ple_layer_ids=ids)).ple_layer_ids == ()


def test_ple_layers_are_sorted_and_unique():
    assert ModelConfig.from_dict(tiny_config(ple_layer_ids=[3, 1, 3])).ple_layer_ids == (1, 3)


@pytest.mark.parametrize("kind", ["qwen4_exp", "qwen4_exp_text"])
def test_both_model_types(kind):
    assert ModelConfig.from_dict({**tiny_config(), "model_type": kind}).hidden_size == 64
    assert ModelConfig.from_dict({**flat_config(), "model_type": kind}).hidden_size == 64


def test_rope_from_the_older_flat_keys():
    raw = without("rope_parameters")
    raw["text_config"].update(rope_theta=1e6, partial_rotary_factor=0.5)
    config = ModelConfig.from_dict(raw)
    assert (config.rope_theta, config.rotary_dim) == (1e6, 16)


def test_fp8_and_mlx_quantisation_sections_are_accepted():
    fp8 = {**tiny_config(), "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert ModelConfig.from_dict(fp8).quantization is None
    section = {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "lm_head": {"group_size": 32, "bits": 8},
        "model.x": False,
    }
    own = {**tiny_config(), "quantization": section, "quantization_config": section}
    assert ModelConfig.from_dict(own).quantization == section


def test_it_is_frozen():
    config = ModelConfig.from_dict(tiny_config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]


def test_the_section_is_a_copy():
    raw = {**tiny_config(), "quantization": {"group_size": 64, "bits": 4}}
    config = ModelConfig.from_dict(raw)
    raw["quantization"]["bits"] = 8
    assert config.quantization["bits"] == 4


def test_reading_does_not_change_the_input():
    raw = tiny_config()
    before = copy.deepcopy(raw)
    ModelConfig.from_dict(raw)
    assert raw == before


def test_replace_checks_again():
    config = ModelConfig.from_dict(tiny_config())
    assert config.replace(seed=5).seed == 5
    with pytest.raises(ConfigError, match="num_experts_per_tok is 9"):
        config.replace(num_experts_per_tok=9)


# Files


def test_file_problems_name_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: not found"):
        read_config(tmp_path)
    for text in ("", "{", "[1]", "null", '"x"', "\ufeff{}", "[" * 100_000, '{"a":' * 50_000, "{'a': 1}", "NaN"):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"config\.json") as caught:
            read_config(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{}")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_from_path(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert ModelConfig.from_path(tmp_path) == ModelConfig.from_dict(tiny_config())


# Hostile values

BAD_NUMBERS = [-1, 2**70, 10**5000, 1.5, float("nan"), float("inf"), "4", "", True, False, [4], [], {}, {"a": 1}]


@pytest.mark.parametrize("name", _INTS)
def test_whole_numbers(name):
    low, high, _ = _INTS[name]
    for value in [*BAD_NUMBERS, low - 1, high + 1, float(low)]:
        message = refusal(tiny_config(**{name: value}))
        assert message.startswith(f"{name} is "), f"{str(value)[:20]}: {message}"
        assert f"{low} to {high}" in message, message
    if name != "seed":
        for value in (0, 2**40):
            assert name in refusal(tiny_config(**{name: value}))


def test_the_ends_of_a_range_are_allowed():
    for name in ("seed", "max_position_embeddings"):  # fields that no other field limits
        for value in _INTS[name][:2]:
            assert getattr(ModelConfig.from_dict(tiny_config(**{name: value})), name) == value


def test_rms_norm_eps():
    for value in [-1e-6, 0, 0.5, *BAD_NUMBERS]:
        message = refusal(tiny_config(rms_norm_eps=value))
        assert message.startswith("rms_norm_eps is ") and "1e-12 to 0.1" in message


@pytest.mark.parametrize("name", ["norm_topk_prob", "attention_bias", "tie_word_embeddings"])
@pytest.mark.parametrize("value", [0, 1, "true", [], [True], {}, 1.0])
def test_booleans(name, value):
    message = refusal(tiny_config(**{name: value}))
    assert message.startswith(f"{name} is ") and "true or false" in message


@pytest.mark.parametrize("name", ["attention_bias", "tie_word_embeddings"])
def test_unsupported_switches(name):
    assert refusal(tiny_config(**{name: True})) == f"{name} is true; supported: false"


def test_tied_embeddings_at_the_top_level():
    assert "tie_word_embeddings" in refusal({**tiny_config(), "tie_word_embeddings": True})
    assert "tie_word_embeddings" in refusal({**tiny_config(), "tie_word_embeddings": "yes"})


ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({**ROPE, "rope_type": "yarn"}, "rope_type"),
        ({**ROPE, "rope_type": None}, "rope_type"),
        ({**ROPE, "rope_type": ["default"]}, "rope_type"),
        ({"type": "linear", "rope_theta": 1e7}, "rope_type"),
        ({**ROPE, "rope_theta": None}, "rope_theta"),
        ({**ROPE, "rope_theta": 0}, "rope_theta"),
        ({**ROPE, "rope_theta": -1e7}, "rope_theta"),
        ({**ROPE, "rope_theta": float("nan")}, "rope_theta"),
        ({**ROPE, "rope_theta": float("inf")}, "rope_theta"),
        ({**ROPE, "rope_theta": 2**70}, "rope_theta"),
        ({**ROPE, "rope_theta": "1e7"}, "rope_theta"),
        ({**ROPE, "rope_theta": True}, "rope_theta"),
        ({**ROPE, "partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ({**ROPE, "partial_rotary_factor": -0.25}, "partial_rotary_factor"),
        ({**ROPE, "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({**ROPE, "partial_rotary_factor": float("nan")}, "partial_rotary_factor"),
        ({**ROPE, "partial_rotary_factor": 3 / 32}, "partial_rotary_factor"),  # 3 dims
        ({**ROPE, "partial_rotary_factor": 1 / 32}, "partial_rotary_factor"),  # 1 dim
        ({**ROPE, "partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ({**ROPE, "partial_rotary_factor": 1.0}, "indexer_head_dim"),  # 32 dims, the indexer has 16
        ("default", "rope_parameters"),
        ([1e7], "rope_parameters"),
        (1e7, "rope_parameters"),
        ({}, "rope_theta"),
    ],
)
def test_rope(rope, field):
    message = refusal(tiny_config(rope_parameters=rope))
    assert field in message, message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads"),
        ({"linear_num_key_heads": 4}, "linear_num_value_heads"),
        ({"indexer_budget": 33}, "indexer_budget"),
        ({"indexer_budget": 3}, "indexer_budget"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_experts": 2}, "num_experts_per_tok"),
        ({"ple_embed_dim": 65}, "ple_embed_dim"),
        ({"heads_per_ngram": 5}, "ple_embed_dim"),
        ({"indexer_head_dim": 6}, "indexer_head_dim"),
        ({"ngram_vocab_size_base": 1 << 30, "heads_per_ngram": 8}, "ngram_vocab_size_base"),
    ],
)
def test_relations(changes, field):
    message = refusal(tiny_config(**changes))
    assert message.startswith(field) and "allowed" in message, message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"eos_token_id": 128}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": [1, 128]}, "eos_token_id"),
        ({"eos_token_id": [[1]]}, "eos_token_id"),
        ({"eos_token_id": "127"}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"eos_token_id": 1.0}, "eos_token_id"),
        ({"eos_token_id": 2**70}, "eos_token_id"),
        ({"eos_token_id": []}, "eos_token_id"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids"),
        ({"ple_layer_ids": [5]}, "ple_layer_ids"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids"),  # full attention
        ({"ple_layer_ids": [-1]}, "ple_layer_ids"),
        ({"ple_layer_ids": [2.0]}, "ple_layer_ids"),
        ({"ple_layer_ids": [True]}, "ple_layer_ids"),
        ({"ple_layer_ids": [None]}, "ple_layer_ids"),
        ({"ple_layer_ids": [[2]]}, "ple_layer_ids"),
        ({"ple_layer_ids": 2}, "ple_layer_ids"),
        ({"ple_layer_ids": "2"}, "ple_layer_ids"),
        ({"ple_layer_ids": {"2": 1}}, "ple_layer_ids"),
        ({"ple_embed_dim": 0}, "ple_embed_dim"),
        ({"ple_embed_dim": -64}, "ple_embed_dim"),
        ({"ple_embed_dim": "64"}, "ple_embed_dim"),
        ({"ple_embed_dim": 2**70}, "ple_embed_dim"),
        ({"layer_types": []}, "layer_types"),
        ({"layer_types": [LINEAR] * 3}, "layer_types"),
        ({"layer_types": [LINEAR] * 5}, "layer_types"),
        ({"layer_types": [LINEAR] * 3 + ["sliding_attention"]}, "layer_types"),
        ({"layer_types": [LINEAR] * 3 + [None]}, "layer_types"),
        ({"layer_types": [LINEAR] * 3 + [[FULL]]}, "layer_types"),
        ({"layer_types": "linear"}, "layer_types"),
        ({"layer_types": {"0": LINEAR}}, "layer_types"),
        ({"layer_types": 4}, "layer_types"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"full_attention_interval": -4}, "full_attention_interval"),
        ({"full_attention_interval": "4"}, "full_attention_interval"),
        ({"output_gate_type": "tanh"}, "output_gate_type"),
        ({"output_gate_type": 1}, "output_gate_type"),
        ({"output_gate_type": ["silu"]}, "output_gate_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_act": 1}, "hidden_act"),
        ({"model_type": "qwen3_next"}, "text_config.model_type"),
        ({"model_type": ["qwen4_exp"]}, "text_config.model_type"),
    ],
)
def test_other_fields(changes, field):
    message = refusal(tiny_config(**changes))
    assert field in message, message


@pytest.mark.parametrize("kind", [None, "llama", "qwen3_next", "", 4, ["qwen4_exp"], {"a": 1}, True])
def test_other_architectures(kind):
    message = refusal({**flat_config(), "model_type": kind})
    assert message.startswith("model_type is ") and "qwen4_exp" in message


def test_a_configuration_of_another_model():
    assert refusal({"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}).startswith(
        "model_type is 'llama'"
    )
    assert refusal({}).startswith("model_type is None")


@pytest.mark.parametrize("section", [[], "text", 5, True])
def test_text_config_of_another_type(section):
    assert refusal({"model_type": "qwen4_exp", "text_config": section}).startswith("text_config is a ")


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantization_config.quant_method is 'gptq'"),
        ({"quant_method": "awq"}, "quantization_config.quant_method is 'awq'"),
        ({"quant_method": None}, "quantization_config.quant_method"),
        ({"bits": 4}, "quantization_config.quant_method"),
        ("gptq", "quantization_config"),
        ("fp8", "quantization_config"),
        (["fp8"], "quantization_config"),
        (8, "quantization_config"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "quantization_config.weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": None}, "quantization_config.weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "quantization_config.weight_block_size"),
    ],
)
@pytest.mark.parametrize("where", ["top", "nested"])
def test_foreign_quantisation(section, field, where):
    raw = tiny_config()
    (raw if where == "top" else raw["text_config"])["quantization_config"] = section
    message = refusal(raw)
    assert message.startswith(field), message


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ([], "quantization"),
        (4, "quantization"),
        ("4bit", "quantization"),
        ({}, "bits"),
        ({"bits": 4}, "group_size"),
        ({"bits": 0, "group_size": 64}, "bits"),
        ({"bits": 64, "group_size": 64}, "bits"),
        ({"bits": "4", "group_size": 64}, "bits"),
        ({"bits": 4, "group_size": 0}, "group_size"),
        ({"bits": 4, "group_size": 2**40}, "group_size"),
        ({"bits": 4, "group_size": 64, "mode": "nf4"}, "quantization.mode"),
        ({"bits": 4, "group_size": 64, "mode": 4}, "quantization.mode"),
        ({"bits": 4, "group_size": 64, "mode": ["affine"]}, "quantization.mode"),
        ({"bits": 4, "group_size": 64, "lm_head": {"mode": "nf4"}}, "lm_head"),
        ({"bits": 4, "group_size": 64, "lm_head": {"mode": 4}}, "lm_head"),
    ],
)
def test_own_quantisation(section, field):
    message = refusal({**tiny_config(), "quantization": section})
    assert "quantization" in message and field in message, message


# Fuzz


def _nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


GARBAGE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 127, 128, 2**31, 2**40, 2**63, 2**70, -(2**70), 10**5000, 0.0, 0.25, 1.0,
    1e300, float("nan"), float("inf"), -float("inf"), "", "silu", "fp8", "qwen4_exp", "full_attention", "\n", "\ud800",
    "x" * 10_000, [], [None], [1, 2], [[1]], ["full_attention"] * 4, {}, {"a": {}}, {"rope_type": "default"}, {1: 2},
    _nested(50), _nested(100_000), (), (2,), b"bytes", object(), {"quant_method": "fp8"}, {"bits": 4, "group_size": 64},
]  # fmt: skip


def _places(value: Any, path: tuple = ()) -> list[tuple]:
    if not isinstance(value, dict):
        return [path]
    return [path, *(place for key, item in value.items() for place in _places(item, (*path, key)))]


def _mutate(raw: dict[str, Any], rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 3))):
        *path, key = rng.choice([place for place in _places(raw) if place])
        target = raw
        for name in path:
            target = target[name]
        kind = rng.randrange(10)
        if kind == 0:
            target.pop(key)
        elif kind == 1:
            target[rng.choice(["quantization", "quantization_config", "layer_types", "rope_scaling", "x"])] = (
                rng.choice(GARBAGE)
            )
        elif kind == 2 and isinstance(target[key], int):
            target[key] += rng.choice((-1, 1, 2, 64))
        else:
            target[key] = rng.choice(GARBAGE)


def test_mutated_configurations_are_read_or_refused():
    rng, outcomes = random.Random(1), {True: 0, False: 0}
    slowest = 0.0
    for i in range(FUZZ):
        raw = tiny_config() if i % 2 else flat_config()
        _mutate(raw, rng)
        started = time.perf_counter()
        try:
            ModelConfig.from_dict(raw)
            outcomes[True] += 1
        except ConfigError as error:
            outcomes[False] += 1
            assert "\n" not in str(error), f"mutation {i}: {error}"
            assert len(str(error)) < 1000, f"mutation {i}: a message of {len(str(error))} characters"
        slowest = max(slowest, time.perf_counter() - started)
    assert min(outcomes.values()) > FUZZ // 20, f"the mutations are one-sided: {outcomes}"
    assert slowest < 1, f"the slowest took {slowest:.2f} s"


def test_very_deep_values_are_refused():
    for name in ("hidden_size", "layer_types", "rope_parameters", "eos_token_id", "rms_norm_eps", "output_gate_type"):
        assert name in refusal(tiny_config(**{name: _nested(20_000)}))
    deep = {"quant_method": _nested(20_000)}
    assert "quantization_config" in refusal({**tiny_config(), "quantization_config": deep})
