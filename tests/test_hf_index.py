"""Where a folder's experts lie: every byte against the tensors themselves, and what cannot be read in place."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from checkpoints import tiny_config
from folders import EXPERTS, KINDS, folder_config, folder_weights, write_folder
from mlx_moe.config import ConfigError, ModelConfig
from mlx_moe.formats.safetensors import FileFormatError, read_header
from mlx_moe.hf_index import NotInPlace, folder_index
from mlx_moe.paging.index import JoinedRows
from mlx_moe.paging.reader import ExpertReader

CONFIG = ModelConfig.from_dict(folder_config())
TABLE = "model.layers.0.ple.ple_embedding.ngram_embedding"
GATE = "model.layers.1.mlp.experts.7.gate_proj"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"


def raw_tensors(folder) -> dict[str, np.ndarray]:
    """Every tensor's bytes, [first axis, bytes], by name without the published prefix."""
    out = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        for name, info in read_header(path)[0].items():
            rows = np.frombuffer(data[info.start : info.stop], np.uint8).reshape(info.shape[0], -1)
            out[name.replace("model.language_model.", "model.")] = rows
    return out


def wanted(tensors: dict[str, np.ndarray], layer: str, e: int, part: str, scales: bool) -> bytes:
    base, name = f"{layer}.mlp.experts", f"{part}_proj"
    if f"{base}.gate_up_proj" in tensors:
        fused = tensors[f"{base}.{'down' if part == 'down' else 'gate_up'}_proj"][e]
        halves = np.split(fused, 2)
        return bytes(fused if part == "down" else halves[part == "up"])
    return bytes(tensors[f"{base}.{e}.{name}.weight{'_scale_inv' * scales}"].reshape(-1))


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_records_hold_the_bytes_of_the_file(tmp_path, kind):
    """Matrices and scales at multiples of 16; nothing else is written; the draft layer is last."""
    folder = write_folder(tmp_path / "m", kind, mtp=True)
    tensors, index = raw_tensors(folder), folder_index(folder, CONFIG).experts
    assert len(index.layers) == 3 and all(layer.experts == EXPERTS for layer in index.layers)
    reader = ExpertReader(index)
    for number, name in enumerate(("model.layers.0", "model.layers.1", "mtp.layers.0")):
        layer = index.layers[number]
        for e in (0, EXPERTS - 1):
            record = np.full(layer.record_bytes, 0xA5, np.uint8)
            reader.read(number, e, record)
            left = np.ones(record.size, bool)
            for which, part, at, scales_at in zip(
                ("gate", "up", "down"), layer.parts, layer.places, layer.scale_places, strict=True
            ):
                assert at % 16 == 0 and bytes(record[at : at + part.length]) == wanted(tensors, name, e, which, False)
                left[at : at + part.length] = False
                assert (part.scales is None) == (scales_at is None) == (part.format != "F8_E4M3")
                if part.scales is not None:
                    end = scales_at + part.scales.length
                    assert scales_at % 16 == 0 and part.scales.format == ("F32" if "F32" in kind else "BF16")
                    assert bytes(record[scales_at:end]) == wanted(tensors, name, e, which, True)
                    left[scales_at:end] = False
            assert (record[left] == 0xA5).all()
    reader.close()


@pytest.mark.parametrize("kind", ["BF16 fused", "FP8"])
def test_rows_lie_in_their_shards(tmp_path, kind):
    """The first and the last row of each, in several files; one scale for all."""
    folder = write_folder(tmp_path / "m", kind)
    tensors, rows = raw_tensors(folder), folder_index(folder, CONFIG).rows()
    assert isinstance(rows, JoinedRows) and rows.format == ("F8_E4M3" if kind == "FP8" else "BF16")
    assert rows.scale == (float(mx.array(0.01, mx.bfloat16)) if kind == "FP8" else None)
    assert len({part.file for part in rows.parts}) > 1
    table = np.concatenate([tensors[f"{TABLE}.shard_{i}.weight"] for i in range(4)])
    assert table.shape == (rows.rows, rows.row_bytes)
    edges = np.cumsum([len(tensors[f"{TABLE}.shard_{i}.weight"]) for i in range(4)])
    for row in (0, *edges[:-1] - 1, *edges[:-1], edges[-1] - 1):
        file, offset = (int(number[0]) for number in rows.places(np.array([row])))
        assert rows.files[file].read_bytes()[offset : offset + rows.row_bytes] == bytes(table[row])


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        (
            f"{GATE}.weight_scale_inv",
            mx.array([[2.0]]),
            r"model.layers.1.mlp.experts.7.gate_proj has F32 scales \(1, 1\)",
        ),
        (f"{GATE}.weight_scale_inv", mx.ones((2, 2), mx.float16), "7.gate_proj has F16 scales"),
        (f"{GATE}.weight_scale_inv", mx.ones((2, 2)), "7.gate_proj has F32 scales"),
    ],
    ids=["one for all", "F16", "another type"],
)
def test_scales_that_kernels_do_not_read(tmp_path, name, scale, message):
    """They can be converted, and the message says so."""
    folder = write_folder(tmp_path / "m", "FP8", **{name: scale})
    with pytest.raises(NotInPlace, match=f"{message}.*read in place: .*mlx-moe convert") as caught:
        folder_index(folder, CONFIG)
    assert "\n" not in str(caught.value)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        ("FP8", {f"{GATE}.weight_scale_inv": None}, ConfigError, "gate_proj of expert 7: its FP8 scales are missing"),
        ("FP8", {f"{GATE}.weight_scale_inv": mx.ones((1, 2))}, ConfigError, r"expert 7: .* shape \(1, 2\)"),
        ("FP8", {f"{GATE}.weight": None}, ConfigError, "gate_proj of expert 7 is missing"),
        ("BF16 per expert", {f"{GATE}.weight": mx.ones((256, 192), mx.bfloat16)}, ConfigError,
         r"model.layers.1.mlp.experts: gate_proj of expert 7 is BF16 \(256, 192\), .* \(model-0000.-of-00003"),
        ("BF16 per expert", {f"{GATE}.weight": mx.ones((192, 256))}, ConfigError, "expert 7 is F32 .*, needed BF16"),
        ("BF16 fused", {FUSED: mx.ones((12, 256, 384), mx.bfloat16)}, ConfigError,
         r"gate_proj of expert 0 is BF16 \(128, 384\), needed BF16 \(192, 256\) \(model"),
        ("BF16 fused", {FUSED: None}, ConfigError, "gate_proj of expert 0 is missing"),
        ("BF16 fused", {FUSED: mx.zeros((12, 384, 32), mx.uint32)}, FileFormatError, "gate_up_proj.: U32"),
        ("BF16 fused", {FUSED: mx.zeros((12, 384, 256), mx.uint8)}, FileFormatError, "is FP8 of all experts in one"),
        ("BF16 fused", {f"{TABLE}.shard_2.weight": None}, ConfigError, "shard 2 is missing"),
        ("BF16 fused", {f"{TABLE}.shard_2.weight": mx.ones((9, 32), mx.bfloat16)}, FileFormatError, "table has shape"),
    ],
)  # fmt: skip
def test_what_is_missing_or_of_another_shape(tmp_path, kind, changes, error, message):
    """In one line that names the weight; also transposed experts."""
    folder = write_folder(tmp_path / "m", kind, **changes)
    with pytest.raises(error, match=message) as caught:
        folder_index(folder, CONFIG)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_tables_of_two_layers(tmp_path):
    with pytest.raises(NotInPlace, match=r"ple_layer_ids is \[1, 3\]; where experts stream, one"):
        folder_index(tmp_path, ModelConfig.from_dict(tiny_config(ple_layer_ids=[1, 3], ple_embed_dim=96)))


def test_a_shard_that_ends_early_or_is_missing(tmp_path):
    folder = write_folder(tmp_path / "m", "BF16 fused")
    path = sorted(folder.glob("*.safetensors"))[1]
    data = path.read_bytes()
    path.write_bytes(data[:-10])
    with pytest.raises(FileFormatError, match=rf"{path.name}: tensor .* ends at byte .* truncated or corrupt"):
        folder_index(folder, CONFIG)
    path.unlink()
    shards = {name: path.name for name in folder_weights("BF16 fused")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(FileFormatError, match=f"1 weight file.s. missing, first '{path.name}'"):
        folder_index(folder, CONFIG)
