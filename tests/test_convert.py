"""Conversions: what they make of every layout, what they keep, what they refuse, and that a kill costs nothing."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from checkpoints import random_weights, tiny_config, with_prefix, write
from custom_kernels.ggml_blocks import format_by_name, naive_dequantize
from gguf_models import write_gguf
from mlx_moe import runtime
from mlx_moe.config import ConfigError, ModelConfig
from mlx_moe.conversion import jobs, plan, run
from mlx_moe.conversion.choices import EXPERT_FORMATS, Choices
from mlx_moe.conversion.imatrix import read_importances
from mlx_moe.conversion.source import open_source
from mlx_moe.formats.checkpoint import read_checkpoint
from mlx_moe.formats.gguf import open_gguf
from mlx_moe.formats.gguf_model import expert_index, model_config, read_weights, row_index
from mlx_moe.formats.pack import Pack, StreamedFile, open_pack, verify_pack
from mlx_moe.formats.pack import writer as writing
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.models.qwen4_exp.gguf_names import Packed, is_streamed, recipes
from mlx_moe.models.qwen4_exp.sanitize import sanitize
from mlx_moe.paging.index import ExpertIndex, RowIndex
from packs import LAYOUTS, contents, wide_config, write_layout, write_quantized

ERRORS = {"IQ2_XXS": 0.37, "IQ2_XS": 0.33, "IQ2_S": 0.28, "IQ3_XXS": 0.20, "Q2_0": 0.37, "IQ4_NL": 0.09, "Q8_0": 0.01,
          "BF16": 0.003}  # fmt: skip
"""Relative RMS errors of Gaussian weights, rounded up."""
ORACLES = ("IQ2_XS-IQ4_NL-Q8_0", "IQ2_S-Q2_0-Q6_K")


def convert(source: Path, out: Path, importances=None, **choices) -> Pack:
    folder = run.run_plan(plan.make_plan(open_source(source), Choices(**choices), importances), out)
    pack = open_pack(folder)
    verify_pack(pack)
    return pack


def relative_error(got: mx.array, want: mx.array) -> float:
    """RMS error over RMS."""
    assert got.shape == want.shape, f"{got.shape}, not {want.shape}"
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    return (mx.linalg.norm((got - want).reshape(-1)) / mx.linalg.norm(want.reshape(-1))).item()


def record_parts(index: ExpertIndex, layer: int, expert: int) -> list[bytes]:
    """The bytes of gate, up and down where the index says that they are."""
    out = []
    for part in index.layers[layer].parts:
        with index.files[part.files[expert]].open("rb") as file:
            file.seek(int(part.offsets[expert]))
            out.append(file.read(part.length))
    return out


def table_bytes(rows: RowIndex) -> bytes:
    with rows.file.open("rb") as file:
        file.seek(rows.offset)
        return file.read(rows.rows * rows.row_bytes)


def numbers(data: bytes, format: str, rows: int) -> mx.array:
    return naive_dequantize(mx.array(np.frombuffer(data, np.uint8)).reshape(rows, -1), format_by_name(format))


def unpacked(pack: Pack) -> dict[str, mx.array]:
    """Every weight of a pack as numbers, under the names and in the layout that ``sanitize`` gives."""
    out, raw = {}, dict(pack.dense())
    for name, value in raw.items():
        if isinstance(value, Packed):
            out[name] = value.numbers()
        elif name.endswith(".weight"):
            base, section = name.removesuffix(".weight"), pack.config.quantization
            how = section.get(base) or section
            scales = [raw[f"{base}.{kind}"] for kind in ("scales", "biases")]
            out[name] = mx.dequantize(value, *scales, how["group_size"], how["bits"])
    for i, layer in enumerate(pack.experts.layers):
        base = f"model.layers.{i}" if i < pack.config.num_hidden_layers else "mtp.layers.0"
        parts = [
            [numbers(data, part.format, part.shape[0]) for data, part in zip(record, layer.parts, strict=True)]
            for record in (record_parts(pack.experts, i, e) for e in range(layer.experts))
        ]
        out[f"{base}.mlp.experts.gate_up_proj.weight"] = mx.stack([mx.concatenate(record[:2]) for record in parts])
        out[f"{base}.mlp.experts.down_proj.weight"] = mx.stack([record[2] for record in parts])
    if pack.rows is not None:
        name = f"model.layers.{pack.config.ple_layer_ids[0] - 1}.ple.ple_embedding.ngram_embedding.weight"
        out[name] = numbers(table_bytes(pack.rows), pack.rows.format, pack.rows.rows)
    return out


def canonical(folder: Path, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
    config = ModelConfig.from_path(folder)
    return sanitize(read_checkpoint(folder).tensors, config, "raw", dtype)


def assert_close(got: dict[str, mx.array], want: dict[str, mx.array], limits) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        error = relative_error(got[name], array)
        assert error <= limits(name), f"{name}: {error}"


# Hugging Face


@pytest.fixture(scope="module", params=LAYOUTS)
def checkpoint(request, tmp_path_factory) -> Path:
    return write_layout(tmp_path_factory.mktemp(request.param), wide_config(), request.param, mtp=True)


@pytest.mark.sample(1)
def test_default_types(checkpoint, tmp_path):
    """IQ2_XS and Q2_0 experts, since 64 divides 192; an IQ4_NL table; matrices in 8 bits, norms as they are."""
    pack = convert(checkpoint, tmp_path / "pack")
    assert {tuple(part.format for part in layer.parts) for layer in pack.experts.layers} == {
        ("IQ2_XS", "IQ2_XS", "Q2_0")
    }

    def limit(name: str) -> float:
        if "gate_up_proj" in name or "experts.down_proj" in name:
            return ERRORS["Q2_0"]
        return ERRORS["IQ4_NL"] if "ngram_embedding" in name else 0.009 if name.endswith("weight") else 0

    assert_close(unpacked(pack), canonical(checkpoint), limit)
    exact = [name for name, value in pack.dense() if isinstance(value, Packed) and "norm" in name]
    assert len(exact) > 20
    assert_close(
        *({name: source[name] for name in exact} for source in (unpacked(pack), canonical(checkpoint))), lambda _: 0
    )


def test_numbers_are_kept_exactly(checkpoint, tmp_path):
    """BF16 is copied, FP8 decoded and rounded once, as ``load_model`` does it."""
    pack = convert(checkpoint, tmp_path / "pack", experts="bf16", dense="keep", ngram="bf16")
    assert_close(unpacked(pack), canonical(checkpoint, mx.bfloat16), lambda _: 0)
    assert pack.config.quantization is None and pack.raw["norm_convention"] == "folded"
    assert "quantization_config" not in pack.raw


def test_layouts_give_the_same_experts(tmp_path):
    packs = [
        convert(write_layout(tmp_path / name, wide_config(), name), tmp_path / f"{name}_pack") for name in LAYOUTS[:2]
    ]
    one, two = (contents(pack.folder) for pack in packs)
    assert one == two


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EXPERT_FORMATS)
def test_every_expert_type(tmp_path, name):
    raw = wide_config(moe_intermediate_size=256, num_experts=2, num_experts_per_tok=1)
    source = write_layout(tmp_path / "hf", raw, "fused")
    pack = convert(source, tmp_path / "pack", experts=name, down=name, dense="bf16")
    kinds = {part.format for layer in pack.experts.layers for part in layer.parts}
    assert kinds == {name.upper()}
    got, want = unpacked(pack), canonical(source)
    for weight in (weight for weight in want if ".experts." in weight):
        assert relative_error(got[weight], want[weight]) < ERRORS[name.upper()], weight


@pytest.mark.parametrize(("bits", "error"), [("8", 0.009), ("6", 0.025), ("4", 0.1)])
def test_dense_bits(tmp_path, bits, error):
    source = write_layout(tmp_path / "hf", wide_config(), "fused")
    pack = convert(source, tmp_path / "pack", dense=bits, experts="bf16", ngram="bf16")
    assert pack.config.quantization["bits"] == int(bits)
    packed = [name for name, value in pack.dense() if not isinstance(value, Packed) and name.endswith(".weight")]
    assert "lm_head.weight" in packed and "model.embed_tokens.weight" in packed
    assert not any(name.removesuffix(".weight").endswith(jobs.NOT_PACKED) for name in packed)
    got, want = unpacked(pack), canonical(source)
    assert all(0 < relative_error(got[name], want[name]) < error for name in packed)


def test_what_is_never_packed_is_the_same_everywhere():
    assert jobs.NOT_PACKED == runtime._NOT_PACKED


@pytest.mark.parametrize(("width", "want"), [(128, "Q2_0"), (96, "IQ4_NL"), (40, "BF16")])
def test_down_fits_the_width(tmp_path, width, want):
    raw = wide_config(moe_intermediate_size=width, num_experts=2, num_experts_per_tok=1)
    source = open_source(write_layout(tmp_path / "hf", raw, "fused"))
    assert plan.make_plan(source, Choices()).targets.down.name == want
    assert plan.make_plan(source, Choices(experts="iq4_nl")).targets.down.name == want


def test_narrow_models_fall_back(tmp_path):
    """Blocks of 256 do not divide rows of 64, blocks of 32 no table rows of 8."""
    raw = tiny_config()
    pack = convert(write(tmp_path / "hf", raw, with_prefix(random_weights(raw))), tmp_path / "pack")
    assert [part.format for part in pack.experts.layers[0].parts] == ["Q2_0", "Q2_0", "IQ4_NL"]
    assert pack.rows.format == "BF16"


def test_importances_are_used(tmp_path):
    """The weighted error falls; an expert's own importances go to that expert."""
    raw = wide_config()
    source = write_layout(tmp_path / "hf", raw, "per_expert")
    rng = np.random.default_rng(3)
    names = [f"model.layers.1.mlp.experts.{part}_proj.weight" for part in ("gate_up", "down")]
    own = {names[0]: rng.lognormal(0, 2, (5, 256)), names[1]: rng.lognormal(0, 2, 192)}
    mx.save_safetensors(str(tmp_path / "i.safetensors"), {name: mx.array(x.astype("f4")) for name, x in own.items()})
    layers = tuple(layer.name for layer in open_source(source).layers)
    importances = read_importances(tmp_path / "i.safetensors", layers, ModelConfig.from_dict(raw))
    plain, weighed = (convert(source, tmp_path / str(i), which) for i, which in enumerate((None, importances)))
    want, a, b = canonical(source), unpacked(plain), unpacked(weighed)
    for name, weights in own.items():
        h = mx.array(weights.astype("f4")).reshape(-1, 1, weights.shape[-1])
        errors = [(h * (got[name] - want[name]) ** 2).sum(axis=(1, 2)) for got in (a, b)]
        assert (errors[1] < 0.97 * errors[0]).all(), name
    other = "model.layers.0.mlp.experts.gate_up_proj.weight"
    assert mx.array_equal(a[other], b[other])


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({"model.layers.7.mlp.experts.down_proj.weight": mx.ones(192)}, "no experts of this model"),
        ({"model.layers.0.mlp.experts.down_proj.weight": mx.ones(191)}, "needed"),
        ({"model.layers.0.mlp.experts.down_proj.weight": mx.ones((4, 192))}, "needed"),
        ({"model.layers.0.mlp.experts.down_proj.weight": mx.ones(192, dtype=mx.int32)}, "needed"),
        ({"model.layers.0.mlp.experts.down_proj.weight": mx.full(192, -1.0)}, "negative"),
        ({"model.layers.0.mlp.experts.down_proj.weight": mx.full(192, mx.nan)}, "NaN"),
        ({}, "no importances"),
    ],
)
def test_importances_that_cannot_be(tmp_path, tensors, word):
    path = tmp_path / "i.safetensors"
    mx.save_safetensors(str(path), tensors)
    with pytest.raises(ValueError, match=word):
        read_importances(path, ("model.layers.0",), ModelConfig.from_dict(wide_config()))


# GGUF


@pytest.fixture(scope="module", params=["split", "joined"])
def gguf(request, tmp_path_factory) -> Path:
    raw = tiny_config(moe_intermediate_size=192, vocab_size=131, num_experts=5)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"

    def formats(name: str) -> str:
        return "Q8_0" if "ffn" in name or "attn_q" in name or name.startswith("token_embd") else "BF16"

    return write_gguf(
        path, raw, random_weights(raw, mtp=True), mtp=True, formats=formats, fused=request.param == "joined"
    )


def assert_same_model(path: Path, pack: Pack) -> None:
    """No bit of any weight changed."""
    file = open_gguf(path)
    raw = model_config(file)
    config = ModelConfig.from_dict(raw)
    assert {key: pack.raw[key] for key in raw} == raw and pack.raw["linear_value_heads_tiled"] is True
    assert pack.config == config
    index = expert_index(file, config)
    assert len(index.layers) == len(pack.experts.layers)
    for i, layer in enumerate(index.layers):
        assert [part.format for part in layer.parts] == [part.format for part in pack.experts.layers[i].parts]
        for e in range(layer.experts):
            assert record_parts(index, i, e) == record_parts(pack.experts, i, e), f"layer {i}, expert {e}"
    rows, mine = row_index(file, config), pack.rows
    assert table_bytes(rows) == table_bytes(mine) and (rows.format, rows.width) == (mine.format, mine.width)
    wanted = {name: recipe for name, recipe in recipes(file.tensors, config).items() if not is_streamed(name)}
    dense = dict(pack.dense())
    assert dense.keys() == wanted.keys()
    for name, want in read_weights(file, wanted):
        got = dense[name]
        assert got.format == want.format and mx.array_equal(got.data, want.data), name


@pytest.mark.parametrize("copy", [False, True])
def test_a_gguf_is_kept_bit_for_bit(gguf, tmp_path, copy):
    pack = convert(gguf, tmp_path / "pack", copy_table=copy)
    assert_same_model(gguf, pack)
    assert (pack.rows.file == gguf) != copy and (tmp_path / "pack" / "ngram.safetensors").exists() == copy


@pytest.mark.parametrize("name", ORACLES)
def test_the_oracles_ggufs_are_kept_bit_for_bit(oracle, tmp_path, name):
    assert_same_model(oracle / f"{name}.gguf", convert(oracle / f"{name}.gguf", tmp_path / "pack"))


def test_the_oracles_checkpoint(oracle, tmp_path):
    pack = convert(oracle / "hf", tmp_path / "pack", experts="keep", dense="keep", ngram="keep")
    assert_close(unpacked(pack), canonical(oracle / "hf"), lambda _: 0)


def test_a_gguf_quantised_again(gguf, tmp_path):
    pack = convert(gguf, tmp_path / "pack", experts="q2_0", dense="8")
    exact = convert(gguf, tmp_path / "exact", experts="bf16", dense="bf16")
    assert [part.format for part in pack.experts.layers[0].parts] == ["Q2_0"] * 3
    assert pack.config.quantization["bits"] == 8 and pack.rows.file == gguf
    assert_close(unpacked(pack), unpacked(exact), lambda name: 0.37 if ".experts." in name else 0.009)


# Refusals


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"experts": "q4_k"}, ("--experts", "q4_k", "iq2_xs")),
        ({"down": "iq2_xs"}, ("--down", "do not divide rows of 192", "q2_0")),
        ({"ngram": "fp8"}, ("--ngram", "fp8", "iq4_nl")),
        ({"dense": "5"}, ("--dense", "5", "6")),
        ({"memory_bytes": 10}, ("--memory", "needed")),
    ],
)
def test_choices_that_cannot_be(tmp_path, choices, words):
    source = write_layout(tmp_path / "hf", wide_config(), "fused")
    with pytest.raises(ConfigError) as caught:
        plan.make_plan(open_source(source), Choices(**choices))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(("flag", "name"), [("experts", "experts"), ("down", "down"), ("ngram", "ngram")])
def test_fp8_cannot_be_kept(tmp_path, flag, name):
    source = open_source(write_layout(tmp_path / "hf", wide_config(), "fp8"))
    with pytest.raises(ConfigError, match=f"--{name} is keep: a pack holds no FP8"):
        plan.make_plan(source, Choices(**{flag: "keep"}))


LAYER = "model.language_model.layers.0."
MLP = f"{LAYER}mlp.experts."


def drop(part: str):
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name]


def put(name: str, array: mx.array):
    return lambda tensors: tensors.update({name: array})


@pytest.mark.parametrize(
    ("layout", "change", "word"),
    [
        ("fused", drop("lm_head.weight"), "lm_head.weight"),
        ("fused", put("odd", mx.ones(3)), "odd"),
        ("fused", put("lm_head.weight", mx.ones((131, 255))), "needed (131, 256)"),
        ("fused", drop(f"{MLP}down_proj"), "down_proj of expert 0 is missing"),
        ("fused", put(f"{MLP}down_proj", mx.ones((5, 256, 64))), "needed"),
        ("fused", put(f"{MLP}0.down_proj.weight", mx.ones((256, 192))), "twice"),
        ("fused", drop("shard_2"), "shard 2 is missing"),
        ("fused", put(f"{LAYER}ple.ple_embedding.layer_multipliers", mx.array([1, 2, 3])), "layer_multipliers"),
        ("fused", put("lm_head.scales", mx.ones(3)), "mx.quantize"),
        ("per_expert", drop(f"{MLP}3.up_proj.weight"), "up_proj of expert 3 is missing"),
        ("per_expert", put(f"{MLP}5.up_proj.weight", mx.ones((192, 256))), "one too many"),
        ("per_expert", put(f"{MLP}2.up_proj.weight", mx.ones((192, 256))), "expert 2 is F32"),
    ],
)
def test_sources_that_are_incomplete(tmp_path, layout, change, word):
    """Named before anything is written."""
    raw = wide_config(ple_layer_ids=[1])
    folder = tmp_path / "hf"
    write_layout(folder, raw, layout, files=1)
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(list(tensors.values()))
    change(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    with pytest.raises((FileFormatError, ConfigError)) as caught:
        open_source(folder)
    assert word in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_fp8_scales_must_fit(tmp_path):
    folder = write_layout(tmp_path / "hf", wide_config(), "fp8", files=1)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"experts.4.up_proj.weight_scale_inv", b"experts.4.up_proj.weight_scala_inv", 1))
    with pytest.raises((FileFormatError, ConfigError), match="scale"):
        open_source(folder)


def test_other_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        open_source(tmp_path / "nothing")
    with pytest.raises(FileFormatError, match="no GGUF model"):
        open_source(tmp_path)
    source = write_layout(tmp_path / "hf", wide_config(), "fused")
    with pytest.raises(FileFormatError, match="is a pack already"):
        open_source(convert(source, tmp_path / "pack").folder)
    with pytest.raises(FileFormatError, match=r"mx\.quantize"):
        open_source(write_quantized(tmp_path / "packed", wide_config(), tmp_path / "plain"))
    raw = tiny_config(ple_layer_ids=[1, 3], ple_embed_dim=96)
    with pytest.raises(ConfigError, match="one n-gram table"):
        open_source(write(tmp_path / "two", raw, random_weights(raw)))


def test_image_tensors_are_left_out(tmp_path, caplog):
    source = write_layout(tmp_path / "hf", wide_config(), "fused", files=1)
    tensors = dict(mx.load(str(source / "model.safetensors")))
    mx.eval(list(tensors.values()))
    mx.save_safetensors(str(source / "model.safetensors"), {**tensors, "model.visual.patch.weight": mx.ones((3, 3))})
    with caplog.at_level(logging.WARNING):
        pack = convert(source, tmp_path / "pack")
    assert "1 tensors of the image encoder" in caplog.text
    assert not any("visual" in name for name in pack.dense_tensors)


# The folder


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A source of few experts."""
    raw = wide_config(num_experts=3, num_experts_per_tok=1)
    folder = write_layout(tmp_path_factory.mktemp("small") / "hf", raw, "fused")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> dict[str, bytes]:
    """What an uninterrupted conversion of it writes."""
    return contents(convert(small, tmp_path_factory.mktemp("whole") / "pack").folder)


def test_tokenizer_files_come_along(whole):
    assert whole["tokenizer.json"] == b"{}" and "generation_config.json" in whole
    assert not any("partial" in name or name.endswith((".tmp", ".new")) for name in whole)


def test_memory_changes_no_byte(small, whole, tmp_path):
    assert contents(convert(small, tmp_path / "pack", memory_bytes=1_000_000_000).folder) == whole


@pytest.mark.parametrize("name", ["config.json", "notes.txt", ".hidden"])
def test_foreign_folders_are_left_alone(small, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(ValueError, match=f"holds other files .{name}"):
        convert(small, tmp_path / "out")
    assert contents(tmp_path / "out") == {name: b"mine"}
    with pytest.raises(ValueError, match="is a file"):
        convert(small, tmp_path / "out" / name)


def test_a_finished_pack_is_not_overwritten(small, tmp_path):
    convert(small, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match="holds other files"):
        convert(small, tmp_path / "out")
    assert contents(tmp_path / "out") == before


class Stop(Exception):
    """In place of a kill, within this process."""


def stop_after(monkeypatch, count: int) -> None:
    calls = iter(range(count))
    original = StreamedFile.append

    def append(self, data) -> None:
        if next(calls, None) is None:
            raise Stop
        original(self, data)

    monkeypatch.setattr(StreamedFile, "append", append)


def test_stopped_conversions_go_on(small, whole, tmp_path, monkeypatch):
    """At every append in turn, with a note after each; finished files are not made again."""
    monkeypatch.setattr(writing, "CHECKPOINT_BYTES", 1)
    out, stops = tmp_path / "out", 0
    while not (out / "config.json").exists():
        with monkeypatch.context() as patch:
            stop_after(patch, 9)
            done = {path.name: path.stat().st_mtime_ns for path in out.glob(".partial/*.safetensors")}
            try:
                convert(small, out)
            except Stop:
                stops += 1
                assert all((out / ".partial" / name).stat().st_mtime_ns == time for name, time in done.items())
                assert {path.name for path in out.iterdir()} == {".partial"}
    assert stops > 5 and contents(out) == whole


def test_an_unfinished_conversion_of_something_else(small, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Stop):
            convert(small, tmp_path / "out")
    with pytest.raises(ValueError, match="another source, or with other options"):
        convert(small, tmp_path / "out", experts="iq2_s")
    with pytest.raises(ValueError, match="another source, or with other options"):
        convert(write_layout(tmp_path / "hf", wide_config(), "per_expert"), tmp_path / "out")
    (tmp_path / "out" / ".partial" / "plan.json").write_text("{")
    with pytest.raises(ValueError, match="another source, or with other options"):
        convert(small, tmp_path / "out")


def test_two_at_once_are_refused(small, tmp_path):
    (tmp_path / "out" / ".partial").mkdir(parents=True)
    with run._alone(tmp_path / "out" / ".partial"), pytest.raises(ValueError, match="another process"):
        convert(small, tmp_path / "out")
    convert(small, tmp_path / "out")


def test_room_is_checked_first(small, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**12, 0, 70_000_000))
    convert(small, tmp_path / "fits")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**12, 0, 60_000_000))
    with pytest.raises(OSError, match=r"0\.1 GB needed, 0\.1 GB free"):
        convert(small, tmp_path / "deep" / "out")
    assert not (tmp_path / "deep").exists()


# Kills and memory

_KILLED = """
import os, signal, sys
from pathlib import Path
from mlx_moe.conversion import plan, run
from mlx_moe.conversion.choices import Choices
from mlx_moe.conversion.source import open_source
from mlx_moe.formats.pack import writer
writer.CHECKPOINT_BYTES, plan._BATCH_BYTES = 1, 20000
source, out, moment = sys.argv[1], sys.argv[2], int(sys.argv[3])
calls = 0

def counted(module, name):
    original = getattr(module, name)
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == moment:
            if name == "pwrite":  # half of the bytes get there
                original(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(module, name, call)

for name in ("pwrite", "fsync", "ftruncate", "unlink", "rmdir"):
    counted(os, name)
for name in ("replace", "mkdir"):
    counted(Path, name)
run.run_plan(plan.make_plan(open_source(source), Choices()), out)
print(calls)
"""


def run_killed(source: Path, out: Path, moment: int) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-c", _KILLED, str(source), str(out), str(moment)]
    return subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(Path.cwd())})


def check_kills(small: Path, whole: dict[str, bytes], tmp_path: Path, moments: list[int]) -> None:
    out = tmp_path / "out"
    for moment in moments:
        done = run_killed(small, out, moment)
        if done.returncode == 0:  # finished before
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        named = {name: data for name, data in contents(out).items() if not name.startswith(".partial")}
        assert all(whole[name] == data for name, data in named.items()), "a file under its final name is not whole"
    if not (out / "config.json").exists() or any(out.glob(".partial/*")):
        convert(small, out)
    assert contents(out) == whole


@pytest.mark.full
def test_killed_twice(small, whole, tmp_path):
    check_kills(small, whole, tmp_path, [60, 45])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_ten_random_moments(small, whole, tmp_path, seed):
    total = int(run_killed(small, tmp_path / "count", 0).stdout)
    rng = random.Random(seed)
    check_kills(small, whole, tmp_path, [rng.randrange(1, total // (1 if seed % 2 else 8)) for _ in range(10)])


_MEASURED = r"""
import re, resource, sys
from mlx_moe.cli import main
status = main(sys.argv[1:])
if sys.platform == "darwin":
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
else:  # where a child's ru_maxrss begins with its parent's
    print(int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024)
sys.exit(status)
"""


@pytest.mark.full
@pytest.mark.parametrize("experts", ["iq4_nl", "bf16"])
def test_memory_stays_below_its_ceiling(tmp_path, experts):
    """Far below 1 GB with a source of 470 MB: MLX and the interpreter take 300, and nothing holds a whole tensor."""
    raw = wide_config(hidden_size=512, moe_intermediate_size=512, num_experts=64, vocab_size=131072)
    source = write_layout(tmp_path / "hf", raw, "fused")
    assert sum(path.stat().st_size for path in source.glob("*.safetensors")) > 450e6
    argv = ["convert", "--model", str(source), "--out", str(tmp_path / "pack"), "--memory", "1GB"]
    argv += ["--experts", experts, "--verify"]
    done = subprocess.run([sys.executable, "-c", _MEASURED, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split()[-1])
    print(f"peak {peak / 1e6:.0f} MB")
    assert peak < 420e6, f"{peak / 1e6:.0f} MB"


def test_json_of_the_config_is_plain(whole):
    raw = json.loads(whole["config.json"])
    assert raw["pack"] == {"format_version": 1, "layout": "ggml"}


@pytest.mark.full
def test_killed_at_each_of_the_last_steps(small, whole, tmp_path):
    """While files get their names and what is left over is removed."""
    total = int(run_killed(small, tmp_path / "count", 0).stdout)
    for moment in range(total - 16, total + 1):
        check_kills(small, whole, tmp_path / str(moment), [moment])
