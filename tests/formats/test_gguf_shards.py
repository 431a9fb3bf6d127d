"""Models of several GGUF files: found from any of them, under any names, in any order, and what is wrong is named."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from gguf_writer import Typed, encode, packed, shards, write_shards
from mlx_moe.formats.gguf import open_gguf
from mlx_moe.formats.safetensors import FileFormatError

META = {"general.architecture": "test", "general.type": "model"}
NAMES = [f"blk.{i}.weight" for i in range(7)]
TENSORS = {name: packed(np.full((2, 3), float(i), dtype=np.float32)) for i, name in enumerate(NAMES)}


@pytest.fixture
def model(tmp_path) -> list[Path]:
    """Three shards as they are published."""
    return write_shards(tmp_path / "model", META, TENSORS, 3)


def assert_whole(source, files: int = 3) -> None:
    file = open_gguf(source)
    assert set(file.tensors) == set(NAMES) and len(file.paths) == files
    assert file.metadata["general.architecture"] == "test", "the metadata is not the first shard's"
    for i, name in enumerate(NAMES):
        assert mx.all(file.read(name) == i).item(), f"{name} holds another tensor"


def refusal(source) -> str:
    with pytest.raises(FileFormatError) as caught:
        open_gguf(source)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000, message
    return message


def renamed(paths: list[Path], names: list[str]) -> list[Path]:
    return [path.rename(path.parent / name) for path, name in zip(paths, names, strict=True)]


# Right


def test_one_file(tmp_path):
    path = tmp_path / "any name.gguf"
    path.write_bytes(encode(META, TENSORS))
    for source in (path, str(path), [path], tmp_path):
        assert_whole(source, 1)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_from_any_shard_the_folder_or_all_files(tmp_path, count):
    paths = write_shards(tmp_path, META, TENSORS, count)
    for source in (*paths, tmp_path, str(tmp_path), paths[::-1]):
        assert_whole(source, count)


def test_a_relative_path(model, monkeypatch):
    monkeypatch.chdir(model[0].parent)
    assert_whole(model[1].name)
    assert_whole(".")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_of_the_list_and_of_the_names(model, order):
    """Shards that carry each other's names: what they say of themselves counts."""
    assert_whole([model[i] for i in order])
    names = [model[i].name for i in order]
    paths = renamed(renamed(model, ["x", "y", "z"]), names)
    for path in (*paths, paths[0].parent):
        assert_whole(path)


def test_renamed_shards(model):
    paths = renamed(model, ["one.gguf", "model-00001-of-00002.gguf", "model (2).gguf"])
    for source in (*paths, paths[0].parent, paths):
        assert_whole(source)


def test_one_renamed_shard(model):
    model[1] = model[1].rename(model[1].parent / "other.gguf")
    for source in (*model, model[0].parent):
        assert_whole(source)


def test_other_files_in_the_folder(model):
    """A vision projector, an importance matrix, a draft layer, other models, a broken file, hidden companions."""
    folder = model[0].parent
    (folder / "mmproj.gguf").write_bytes(encode({"general.type": "mmproj"}, {"v.blk.0.weight": TENSORS[NAMES[0]]}))
    (folder / "imatrix.gguf").write_bytes(encode({"general.type": "imatrix"}, {NAMES[0]: TENSORS[NAMES[0]]}))
    (folder / "mtp.gguf").write_bytes(encode(META, {"token_embd.weight": TENSORS[NAMES[0]]}))
    (folder / "broken.gguf").write_bytes(b"GGUF")
    (folder / "._model-00001-of-00003.gguf").write_bytes(b"\0\5\x16\7")
    (folder / "README.md").write_text("hello")
    for source in (*model, folder):
        assert_whole(source)
    for path in renamed(model, ["a.gguf", "b.gguf", "c.gguf"]):
        assert_whole(path)
    assert_whole(folder)


def test_two_quantisations_in_one_folder(model):
    folder = model[0].parent
    write_shards(folder, META, TENSORS, 3, stem="other")
    for path in model:
        assert_whole(path)
    assert "name the files of one" in refusal(folder)
    (folder / "single.gguf").write_bytes(encode(META, TENSORS))
    assert "holds 2 GGUF models" in refusal(folder)
    assert_whole(folder / "single.gguf", 1)


def test_split_and_merged_again(tmp_path):
    split = {"split.no": Typed("u16", 0), "split.count": Typed("u16", 0), "split.tensors.count": Typed("i32", 7)}
    (tmp_path / "merged.gguf").write_bytes(encode({**META, **split}, TENSORS))
    assert_whole(tmp_path / "merged.gguf", 1)


# Wrong


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_missing_shard_is_named(model, gone):
    model.pop(gone).unlink()
    name = f"model-{gone + 1:05d}-of-00003.gguf"
    for source in (*model, model[0].parent):
        assert f"shard {gone + 1} of 3 ({name}) is missing" in refusal(source)
    assert f"shard {gone + 1} of 3 is missing" in refusal(model)
    for path in renamed(model, ["a.gguf", "b.gguf"]):
        assert f"shard {gone + 1} of 3 is missing" in refusal(path)


def test_a_damaged_shard_is_named(model):
    model[1].write_bytes(model[1].read_bytes()[:100])
    for source in (*model, model, model[0].parent):
        assert model[1].name in refusal(source)


def test_a_shard_of_another_model(model, tmp_path):
    write_shards(tmp_path / "other", META, {**TENSORS, "blk.7.weight": TENSORS[NAMES[0]]}, 3)
    shutil.copy(tmp_path / "other" / model[2].name, model[2])
    for source in (model[0], model):
        assert "another model" in refusal(source)


def test_one_shard_twice(model):
    shutil.copy(model[0], model[1])
    for source in (model[0], model, model[0].parent):
        message = refusal(source)
        assert model[0].name in message and model[1].name in message and "are both shard 1 of 3" in message


def test_a_tensor_in_two_shards(tmp_path):
    contents = shards(META, TENSORS, 2)
    tail = {"split.no": Typed("u16", 1), "split.count": Typed("u16", 2), "split.tensors.count": Typed("i32", 7)}
    (tmp_path / "a.gguf").write_bytes(contents[0])
    (tmp_path / "b.gguf").write_bytes(encode(tail, {name: TENSORS[name] for name in NAMES[2:6]}))
    message = refusal(tmp_path)
    assert "a.gguf" in message and "b.gguf" in message and repr(NAMES[2]) in message


def test_too_few_tensors(tmp_path):
    contents = shards(META, TENSORS, 2)
    tail = {"split.no": Typed("u16", 1), "split.count": Typed("u16", 2), "split.tensors.count": Typed("i32", 7)}
    (tmp_path / "a.gguf").write_bytes(contents[0])
    (tmp_path / "b.gguf").write_bytes(encode(tail, {name: TENSORS[name] for name in NAMES[4:]}))
    assert "hold 6 of 7 tensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("number", "count", "total"),
    [(0, 10_000, 7), (3, 3, 7), (65535, 3, 7), (0, -1, 7), (-1, 3, 7), (0, "3", 7), (0, 3.0, 7), (0, 3, "7")],
    ids=str,
)
def test_absurd_splits(tmp_path, number, count, total):
    def value(x):
        return Typed("i32", x) if type(x) is int else x

    split = {"split.no": value(number), "split.count": value(count), "split.tensors.count": value(total)}
    (tmp_path / "a.gguf").write_bytes(encode({**META, **split}, TENSORS))
    for source in (tmp_path / "a.gguf", [tmp_path / "a.gguf"], tmp_path):
        assert "a.gguf" in refusal(source)


def test_no_files(tmp_path):
    assert "holds no GGUF model" in refusal(tmp_path)
    assert "no GGUF file was named" in refusal([])
    assert "missing.gguf" in refusal(tmp_path / "missing.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    assert "broken.gguf" in refusal(tmp_path)


def test_two_models_in_a_list(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(encode(META, TENSORS))
    assert "both shard 1 of 1" in refusal([tmp_path / "a.gguf", tmp_path / "b.gguf"])
    assert "2 GGUF models" in refusal(tmp_path)


# Links


def snapshot(tmp_path: Path, sub: str) -> list[Path]:
    """A model as the Hub's cache holds it: links of a snapshot to blobs named by hash."""
    cache = tmp_path / "models--org--name"
    folder = cache / "snapshots" / "0123abc" / sub
    folder.mkdir(parents=True)
    (cache / "blobs").mkdir()
    out = []
    for i, content in enumerate(shards(META, TENSORS, 3)):
        blob = cache / "blobs" / f"{i}f00"
        blob.write_bytes(content)
        out.append(folder / f"model-{i + 1:05d}-of-00003.gguf")
        out[-1].symlink_to(os.path.relpath(blob, folder))
    return out


@pytest.mark.parametrize("sub", ["", "UD-Q2_K_XL"])
def test_the_hubs_cache(tmp_path, sub):
    paths = snapshot(tmp_path, sub)
    for source in (*paths, paths, paths[0].parent):
        assert_whole(source)


@pytest.mark.parametrize("target", ["secret/x", "models--other--name/blobs/x", "models--org--name/snapshots/x"])
def test_links_out_of_the_snapshot(tmp_path, target):
    paths = snapshot(tmp_path, "")
    secret = tmp_path / target
    secret.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(paths[2], secret)
    paths[2].unlink()
    paths[2].symlink_to(secret)
    for source in (paths[0], paths[0].parent):
        message = refusal(source)
        assert paths[2].name in message and "out of the model's folder" in message
    assert_whole(paths)  # files that are named one by one are the user's own choice


def test_links_beside_a_plain_model(model, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = [path.rename(elsewhere / path.name) for path in model[1:]]
    for path, target in zip(model[1:], moved, strict=True):
        path.symlink_to(target)
    assert "out of the model's folder" in refusal(model[0])
    assert_whole(model)


def test_a_link_to_one_file_of_a_model(model, tmp_path):
    """The others may be linked beside it as well: they lie where the named one leads to."""
    folder = tmp_path / "links"
    folder.mkdir()
    for path in model:
        (folder / path.name).symlink_to(path)
    assert_whole(folder / model[0].name)
    assert "out of the model's folder" in refusal(folder)


def test_links_in_a_circle_and_to_nothing(model):
    for target in (model[1], model[1].parent / "nothing"):
        model[1].unlink()
        model[1].symlink_to(target)
        for source in (model[0], model[0].parent):
            assert model[1].name in refusal(source)
