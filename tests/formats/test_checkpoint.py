"""Folders of weight files: reading through an index or without one, and writing that is whole or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_moe.formats import checkpoint
from mlx_moe.formats.checkpoint import INDEX, atomic_path, read_checkpoint, write_checkpoint, write_json
from mlx_moe.formats.safetensors import FileFormatError


def put(path: Path, *names: str, value: float = 1.0) -> None:
    mx.save_safetensors(str(path), {name: mx.full((2, 3), value) for name in names})


def put_index(folder: Path, content: Any) -> None:
    (folder / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))


def refusal(folder: Path) -> str:
    with pytest.raises(FileFormatError) as caught:
        read_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(folder)) + 500, str(caught.value)[:300]
    return str(caught.value)


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Reading


def test_without_an_index_all_files_are_read(tmp_path):
    put(tmp_path / "one.safetensors", "a", "b")
    put(tmp_path / "two.safetensors", "c")
    found = read_checkpoint(str(tmp_path))
    assert set(found.tensors) == {"a", "b", "c"}
    assert found.files == {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    assert found.folder == tmp_path


def test_the_index_says_which_files_count(tmp_path):
    put(tmp_path / "model-00001-of-00002.safetensors", "a")
    put(tmp_path / "model-00002-of-00002.safetensors", "b")
    put(tmp_path / "consolidated.safetensors", "a", "b", value=2.0)
    put_index(
        tmp_path,
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}},
    )
    found = read_checkpoint(tmp_path)
    assert set(found.tensors) == {"a", "b"}
    assert found.tensors["a"].max().item() == 1.0


def test_a_missing_shard_is_named(tmp_path):
    put(tmp_path / "model-00001-of-00003.safetensors", "a")
    put_index(
        tmp_path, {"weight_map": {name: f"model-0000{i}-of-00003.safetensors" for i, name in enumerate("abc", 1)}}
    )
    message = refusal(tmp_path)
    assert "2 weight file(s) missing" in message
    assert "model-00002-of-00003.safetensors" in message


def test_a_damaged_shard_is_named(tmp_path):
    put(tmp_path / "model-00001-of-00002.safetensors", "a")
    put(tmp_path / "model-00002-of-00002.safetensors", "b")
    whole = (tmp_path / "model-00002-of-00002.safetensors").read_bytes()
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(whole[:-1])
    assert "model-00002-of-00002.safetensors" in refusal(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    put(tmp_path / "one.safetensors", "a", "b")
    put(tmp_path / "two.safetensors", "b", "c")
    message = refusal(tmp_path)
    assert "two.safetensors" in message and "one.safetensors" in message and "'b'" in message


def test_no_weights(tmp_path):
    assert "no .safetensors files" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "no .safetensors files" in refusal(tmp_path)
    put_index(tmp_path, {"weight_map": {}})
    assert "no .safetensors files" in refusal(tmp_path)


def test_hidden_files_are_not_weights(tmp_path):
    """macOS leaves ``._name`` beside files on other file systems, a killed write leaves a temporary file."""
    put(tmp_path / "model.safetensors", "a")
    (tmp_path / "._model.safetensors").write_bytes(b"\0\5\x16\7" + b"\0" * 60)
    (tmp_path / ".tmp1234.safetensors").write_bytes(b"")
    assert set(read_checkpoint(tmp_path).tensors) == {"a"}


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "./model.safetensors",
        "..",
        ".",
        "",
        "sub/../model.safetensors",
        "model.safetensors/",
    ],
)
def test_the_index_stays_in_its_folder(tmp_path, name):
    inner = tmp_path / "inner"
    (inner / "sub").mkdir(parents=True)
    for folder in (tmp_path, inner, inner / "sub"):
        put(folder / "model.safetensors", "a")
    put_index(inner, {"weight_map": {"a": name}})
    message = refusal(inner)
    assert INDEX in message and "not a file of this folder" in message


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "model.safetensors\n"])
def test_file_names_that_cannot_be(tmp_path, name):
    put_index(tmp_path, {"weight_map": {"a": name}})
    refusal(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "[]",
        "3",
        '"weight_map"',
        "{}",
        '{"weight_map": null}',
        '{"weight_map": []}',
        '{"weight_map": "model.safetensors"}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": null}}',
        '{"weight_map": {"a": ["model.safetensors"]}}',
        '{"weight_map": {"a": "model.safetensors", "b": 3}}',
        '{"weight_map": {"a": {"b": "c"}}}',
        '{"a":' * 100_000,
        "[" * 100_000,
    ],
    ids=lambda content: content[:40],
)
def test_an_index_that_is_none(tmp_path, content):
    put(tmp_path / "model.safetensors", "a")
    put_index(tmp_path, content)
    assert INDEX in refusal(tmp_path)


def test_an_index_that_is_not_text(tmp_path):
    (tmp_path / INDEX).write_bytes(b"\xff\xfe\x00\x01")
    assert INDEX in refusal(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / INDEX).mkdir()
    assert INDEX in refusal(tmp_path)


# Writing


def tensors(value: float = 1.0) -> dict[str, mx.array]:
    return {name: mx.full((4, 8), value + i) for i, name in enumerate("abcde")}  # 128 bytes each


def assert_holds(folder: Path, value: float) -> None:
    found = read_checkpoint(folder).tensors
    want = tensors(value)
    assert set(found) == set(want)
    for name in want:
        assert mx.array_equal(found[name], want[name]).item(), f"{name} is not what was written"


def test_one_file(tmp_path):
    write_checkpoint(tmp_path / "new" / "folder", tensors(), {"z": 1, "a": 2})
    assert_holds(tmp_path / "new" / "folder", 1.0)
    assert "model.safetensors" in listing(tmp_path / "new" / "folder")
    text = (tmp_path / "new" / "folder" / "config.json").read_text()
    assert json.loads(text) == {"z": 1, "a": 2}
    assert text.index('"a"') < text.index('"z"'), "keys are sorted"


@pytest.mark.parametrize(("limit", "files"), [(128, 5), (129, 5), (256, 3), (300, 3), (384, 2), (640, 1), (1, 5)])
def test_sharding(tmp_path, monkeypatch, limit, files):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", limit)
    write_checkpoint(tmp_path, tensors(), {})
    assert_holds(tmp_path, 1.0)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == files
    if files > 1:
        assert [path.name for path in shards] == [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == 5 * 128
        assert index["weight_map"] == read_checkpoint(tmp_path).files


@pytest.mark.parametrize(("before", "after"), [(128, 1 << 30), (1 << 30, 128), (128, 256), (256, 128)])
def test_writing_over_another_layout_leaves_the_new_weights(tmp_path, monkeypatch, before, after):
    """The index of an earlier, sharded save must not make the new save invisible."""
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", before)
    write_checkpoint(tmp_path, tensors(1.0), {})
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", after)
    write_checkpoint(tmp_path, tensors(50.0), {})
    assert_holds(tmp_path, 50.0)


def test_files_are_readable_by_others(tmp_path):
    write_checkpoint(tmp_path, tensors(), {})
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o644, path.name


def test_a_failing_write_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, tensors(1.0), {"version": 1})
    before = listing(tmp_path)

    def full_disk(path, *args, **kwargs):
        Path(path).write_bytes(b"half")
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(mx, "save_safetensors", full_disk)
    with pytest.raises(RuntimeError, match="no space left"):
        write_checkpoint(tmp_path, tensors(2.0), {"version": 2})
    assert listing(tmp_path) == before, "a temporary file stayed"
    assert json.loads((tmp_path / "config.json").read_text()) == {"version": 1}
    assert_holds(tmp_path, 1.0)


def test_config_comes_last(tmp_path, monkeypatch):
    """A folder whose weights failed has no config.json, so it cannot be taken for a model."""
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 128)
    original, calls = mx.save_safetensors, []

    def third_fails(path, *args, **kwargs):
        calls.append(path)
        if len(calls) == 3:
            raise RuntimeError("no space left on device")
        original(path, *args, **kwargs)

    monkeypatch.setattr(mx, "save_safetensors", third_fails)
    with pytest.raises(RuntimeError):
        write_checkpoint(tmp_path, tensors(), {})
    assert listing(tmp_path) == ["model-00001-of-00005.safetensors", "model-00002-of-00005.safetensors"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_atomic_path(tmp_path, error):
    target = tmp_path / "file.json"
    target.write_text("old")
    with pytest.raises(error), atomic_path(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
        raise error
    assert listing(tmp_path) == ["file.json"]
    assert target.read_text() == "old"
    with atomic_path(target) as temporary:
        temporary.write_text("new")
        assert temporary.parent == tmp_path, "a rename is atomic only within one file system"
    assert target.read_text() == "new"
    assert listing(tmp_path) == ["file.json"]


def test_atomic_path_removed_by_the_writer(tmp_path):
    with pytest.raises(RuntimeError, match="the reason"), atomic_path(tmp_path / "x") as temporary:
        temporary.unlink()
        raise RuntimeError("the reason")


def test_write_json_of_what_is_none(tmp_path):
    write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert listing(tmp_path) == ["x.json"]
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write_checkpoint(tmp_path / "file", tensors(), {})
