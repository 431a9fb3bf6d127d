"""The pack's format: files that survive their writer, what a reader refuses, and tables that are left elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.ggml_blocks import format_by_name
from mlx_moe.config import ConfigError
from mlx_moe.conversion.choices import Choices
from mlx_moe.conversion.plan import make_plan
from mlx_moe.conversion.run import run_plan
from mlx_moe.conversion.source import open_source
from mlx_moe.formats.pack import RecordLayout, StreamedFile, TableReference, TensorSpec, is_pack, open_pack, verify_pack
from mlx_moe.formats.pack import writer as writing
from mlx_moe.formats.safetensors import FileFormatError, read_header
from mlx_moe.models.qwen4_exp.gguf_names import Packed
from mlx_moe.paging.index import RowIndex
from packs import wide_config, write_layout

SPECS = (TensorSpec("a", "F32", (3, 5)), TensorSpec("b", "U8", (7, 11)), TensorSpec("empty", "U8", (0, 4)))
DATA = bytes(np.random.default_rng(0).integers(0, 256, 60 + 77, dtype=np.uint8))


def write_in(path: Path, step: int, stop: int | None = None, cut=lambda done: done) -> StreamedFile:
    with StreamedFile(path, SPECS, {"note": "x"}, cut) as stream:
        while stream.done < (len(DATA) if stop is None else stop):
            stream.append(memoryview(DATA[stream.done : stream.done + step]))
        if stop is None:
            stream.finish()
        return stream


# Writing


@pytest.mark.parametrize("step", [1, 16, 59, 61, 1000])
def test_a_file_is_safetensors_whatever_the_pieces(tmp_path, step):
    write_in(tmp_path / "x.safetensors", step)
    tensors, metadata = read_header(tmp_path / "x.safetensors")
    assert tensors["a"].start == writing.PAGE_BYTES and metadata["note"] == "x"
    loaded = mx.load(str(tmp_path / "x.safetensors"))
    assert np.array(loaded["a"]).tobytes() + np.array(loaded["b"]).tobytes() == DATA
    write_in(tmp_path / "y.safetensors", 7)
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.safetensors", "y.safetensors"]


@pytest.mark.parametrize("noted", [0, 1, 40, 60, 100, 136])
def test_a_file_goes_on_from_what_was_noted(tmp_path, monkeypatch, noted):
    """Bytes after the note may be missing or wrong: they are written again."""
    path, whole = tmp_path / "x.safetensors", tmp_path / "whole.safetensors"
    write_in(whole, 50)
    monkeypatch.setattr(writing, "CHECKPOINT_BYTES", 1)
    write_in(path, 1, noted)
    temporary, progress = writing.temporary_names(path)
    with temporary.open("ab") as file:
        file.write(b"torn")
    assert not path.exists()
    if noted:
        assert json.loads(progress.read_text())["bytes"] == noted
    first = write_in(path, 9, cut=lambda done: done // 20 * 20)
    assert first.done == len(DATA)
    assert path.read_bytes() == whole.read_bytes() and not progress.exists() and not temporary.exists()


@pytest.mark.parametrize("note", ["", "{", "[]", '{"bytes": -5}', '{"bytes": "9"}', '{"bytes": 100000}'])
def test_a_damaged_note_starts_again(tmp_path, note):
    path = tmp_path / "x.safetensors"
    write_in(path, 50, 50)
    writing.temporary_names(path)[1].write_text(note)
    write_in(path, 50)
    write_in(tmp_path / "whole.safetensors", 50)
    assert path.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_a_file_has_exactly_its_bytes(tmp_path):
    with StreamedFile(tmp_path / "x.safetensors", SPECS, {}) as stream:
        with pytest.raises(ValueError, match="138 bytes of 137"):
            stream.append(memoryview(bytes(138)))
        with pytest.raises(ValueError, match="ends after 0 of 137"):
            stream.finish()


@pytest.mark.parametrize("name", ["Q2_0", "Q8_0", "BF16"])
def test_parts_of_a_record_are_aligned(name):
    layout = RecordLayout.of((format_by_name(name),) * 3, 192, 64)
    assert all(part.offset % 16 == 0 for part in layout.parts) and layout.stride % 16384 == 0
    ends = [part.offset + part.length for part in layout.parts]
    assert ends[0] <= layout.parts[1].offset and ends[1] <= layout.parts[2].offset and ends[2] <= layout.stride
    assert layout == RecordLayout.from_json("x", json.loads(json.dumps(layout.to_json("model.layers.0"))), 192, 64)


# Reading


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pack")
    source = open_source(write_layout(root / "hf", wide_config(), "fused", mtp=True))
    return run_plan(make_plan(source, Choices(dense="8")), root / "pack")


@pytest.fixture
def pack(original, tmp_path) -> Path:
    """A copy that may be damaged."""
    folder = tmp_path / "pack"
    folder.mkdir()
    for path in original.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def edit_header(path: Path, change) -> None:
    """Change a file's JSON header; its length stays."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    assert len(text) <= size
    path.write_bytes(data[:8] + text.ljust(size) + data[8 + size :])


def edit_config(folder: Path, change) -> None:
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))


def assert_refused(folder: Path, *words: str) -> None:
    with pytest.raises((FileFormatError, ConfigError)) as caught:
        _ = open_pack(folder).rows
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), caught.value


def test_a_pack_says_what_it_holds(original):
    pack = open_pack(original)
    assert is_pack(original) and not is_pack(original.parent / "hf")
    assert pack.has_mtp and len(pack.experts.layers) == 3
    layer = pack.experts.layers[1]
    assert [part.format for part in layer.parts] == ["IQ2_XS", "IQ2_XS", "Q2_0"]
    assert [part.shape for part in layer.parts] == [(192, 256), (192, 256), (256, 192)]
    file = pack.experts.files[layer.gate.files[0]]
    assert (layer.gate.offsets % 16384 == 0).all() and file.name.startswith("experts-00002")
    assert pack.rows.format == "IQ4_NL" and pack.rows.width == 32
    assert verify_pack(pack) == sum(len(file.tensors) for file in pack.files)
    dense = dict(pack.dense())
    assert isinstance(dense["model.layers.0.mlp.gate.weight"], Packed)
    assert {dense[f"lm_head.{kind}"].dtype for kind in ("scales", "biases")} == {mx.bfloat16}
    assert dense["lm_head.weight"].dtype == mx.uint32


@pytest.mark.parametrize("key", ["format_version", "layout"])
@pytest.mark.parametrize("value", ["2", "planar", None])
def test_other_versions_are_refused_by_name(pack, key, value):
    files = sorted(pack.glob("*.safetensors"))
    for path in (files[0], files[-1]):
        whole = path.read_bytes()
        edit_header(path, lambda header: header["__metadata__"].update({key: value or ""}))
        assert_refused(pack, path.name, key, value or "''", "supported")
        path.write_bytes(whole)
    edit_config(pack, lambda raw: raw["pack"].update({key: value}))
    assert_refused(pack, "config.json", key, "missing" if value is None else value)


def set_record(path: Path, change) -> None:
    def inner(header) -> None:
        records = json.loads(header["__metadata__"]["records"])
        change(next(iter(records.values())))
        header["__metadata__"]["records"] = json.dumps(records)

    edit_header(path, inner)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda entry: entry.update(layer="model.layers.1"), "model.layers.1"),
        (lambda entry: entry.update(layer="model.layers.9"), "model.layers.0"),
        (lambda entry: entry.update(layer=5), "5"),
        (lambda entry: entry.pop("up"), "gate, up and down"),
        (lambda entry: entry["up"].update(offset=0), "needed: [192, 256]"),
        (lambda entry: entry["up"].update(offset=-16), "at -16"),
        (lambda entry: entry["down"].update(shape=[192, 256]), "needed: [256, 192]"),
        (lambda entry: entry["down"].update(shape=None), "None"),
        (lambda entry: entry["gate"].update(format="IQ9"), "IQ9"),
        (lambda entry: entry["gate"].update(format=["IQ2_XS"]), "supported"),
        (lambda entry: entry["gate"].update(format="BF16"), "needed: [192, 256]"),
        (lambda entry: entry["down"].update(format="IQ2_XS"), "not a multiple"),
    ],
)
def test_records_that_cannot_be(pack, change, word):
    """Parts that overlap, leave the record, or are of another model."""
    set_record(pack / "experts-00001-of-00003.safetensors", change)
    assert_refused(pack, word)


@pytest.mark.parametrize("value", ["[", "[]", '{"x": {}}', "5", "[" * 100_000])
@pytest.mark.parametrize("key", ["records", "tables"])
def test_metadata_that_is_not_what_it_should_be(pack, key, value):
    path = pack / ("experts-00001-of-00003.safetensors" if key == "records" else "ngram.safetensors")
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"][key] = value
    text = json.dumps(header).encode().ljust(size + 131072)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    assert_refused(pack, path.name)


def test_files_that_are_missing_short_or_twice(pack):
    file = pack / "experts-00002-of-00003.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert_refused(pack, file.name, "truncated")
    file.write_bytes(whole[:40])
    assert_refused(pack, file.name, "truncated")
    file.unlink()
    assert_refused(pack, "holds 2 files experts")
    file.write_bytes(whole)
    (pack / "experts-again.safetensors").write_bytes(whole)
    assert_refused(pack, "holds 4 files")
    (pack / "experts-again.safetensors").rename(pack / "model-again.safetensors")
    assert_refused(pack)
    (pack / "model-again.safetensors").unlink()
    (pack / "ngram.safetensors").unlink()
    assert_refused(pack, "0 n-gram tables; needed: 1")


def test_a_shifted_tensor_is_refused(pack):
    """Records must start at a multiple of 16 KiB."""
    path = pack / "experts-00001-of-00003.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    path.write_bytes((size + 32).to_bytes(8, "little") + data[8 : 8 + size] + b" " * 32 + data[8 + size :])
    assert_refused(pack, "multiple of 16384")


def test_dense_blocks_must_be_rows_of_them(pack):
    path = pack / "model-00001-of-00004.safetensors"
    edit_header(path, lambda header: header["__metadata__"].update(blocks='{"lm_head.weight": "Q8_0"}'))
    assert_refused(pack, "lm_head.weight", "no rows of Q8_0")


def test_another_models_config(pack):
    edit_config(pack, lambda raw: raw["text_config"].update(moe_intermediate_size=64))
    assert_refused(pack, "needed")
    edit_config(pack, lambda raw: raw["text_config"].update(moe_intermediate_size=192, num_experts=4))
    assert_refused(pack, "needed: U8 [4,")
    edit_config(pack, lambda raw: raw["text_config"].update(num_experts=5, ngram_vocab_size_base=97))
    assert_refused(pack, "ngram.safetensors")
    edit_config(pack, lambda raw: raw.pop("pack"))
    assert_refused(pack, "no section 'pack'")


def test_verify_names_what_changed(pack):
    path = pack / "experts-00003-of-00003.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileFormatError, match=r"experts-00003.*mtp\.layers\.0.*not what was written"):
        verify_pack(open_pack(pack))
    edit_header(path, lambda header: header["__metadata__"].update(crc32="{}"))
    with pytest.raises(FileFormatError, match="has no checksum"):
        verify_pack(open_pack(pack))


# Tables that are left where they are


@pytest.fixture
def table(tmp_path) -> RowIndex:
    path = tmp_path / "there" / "model.gguf"
    path.parent.mkdir()
    path.write_bytes(os.urandom(100 + 4096 * 18 + 50))
    return RowIndex(path, 100, 4096, 32, 18, "IQ4_NL")


def test_a_table_is_found_again(table, tmp_path):
    folder = tmp_path / "packs" / "mine"
    folder.mkdir(parents=True)
    reference = TableReference.to_table(table)
    assert reference == TableReference.from_json(folder, json.loads(json.dumps(vars(reference))))
    assert reference.find(folder) == table
    for place in (folder, folder.parent):
        table.file.rename(place / "model.gguf")
        found = reference.find(folder)
        assert found.file == place / "model.gguf" and found.offset == 100
        (place / "model.gguf").rename(table.file)


@pytest.mark.parametrize("at", [100, 100 + 4096 * 18 - 1])
def test_a_table_that_changed_or_moved_is_named(table, tmp_path, at):
    reference = TableReference.to_table(table)
    data = bytearray(table.file.read_bytes())
    data[at] ^= 1
    table.file.write_bytes(data)
    with pytest.raises(FileFormatError, match=r"model\.gguf, which has changed; put .* or convert again"):
        reference.find(tmp_path / "pack")
    table.file.write_bytes(data[:5000])
    with pytest.raises(FileFormatError, match="has changed"):
        reference.find(tmp_path / "pack")
    table.file.unlink()
    with pytest.raises(FileFormatError, match="is not there any more"):
        reference.find(tmp_path / "pack")
    table.file.mkdir()
    with pytest.raises(FileFormatError, match="has changed"):
        reference.find(tmp_path / "pack")


@pytest.mark.parametrize(
    "change",
    [{"offset": -1}, {"rows": 0}, {"rows": 1 << 40}, {"bytes": 5}, {"width": 31}, {"format": "X"}, {"file": "a\0b"},
     {"sha256": 5}, {"rows": 1.5}, {"offset": True}, {"width": None}],
)  # fmt: skip
def test_references_that_cannot_be(table, tmp_path, change):
    with pytest.raises(FileFormatError):
        TableReference.from_json(tmp_path, {**vars(TableReference.to_table(table)), **change})
    with pytest.raises(FileFormatError):
        TableReference.from_json(tmp_path, None)
