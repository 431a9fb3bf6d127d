"""Which files of a listing make one model; no network, no disk."""

from __future__ import annotations

import json

import pytest

from gguf_writer import encode
from mlx_moe.formats.hub_plan import (
    ChoiceError,
    PlanError,
    RepoFile,
    by_numbering,
    choose,
    draft_file,
    exact_pattern,
    human,
    is_plain,
    side_files,
    variants,
    with_index,
)
from mlx_moe.formats.hub_start import START_BYTES, architecture
from mlx_moe.formats.safetensors import FileFormatError

GB = 10**9


def listing(*paths: str, size: int = GB, **sizes: int) -> list[RepoFile]:
    return [RepoFile(path, sizes.get(path, size)) for path in paths]


def shards(base: str, count: int, suffix: str = "gguf") -> list[str]:
    return [f"{base}-{i:05d}-of-{count:05d}.{suffix}" for i in range(1, count + 1)]


def index(*names: str) -> str:
    return json.dumps({"weight_map": {f"tensor{i}": name for i, name in enumerate(names)}})


PUBLISHED = [
    *shards("model", 3, "safetensors"), "model.safetensors.index.json", "config.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja",
]  # fmt: skip
UNWANTED = [
    "README.md", "LICENSE", ".gitattributes", "pytorch_model.bin", "model.pt", "optimizer.pth", "weights.pkl",
    "model.ckpt", "modeling_qwen4.py", "configuration_qwen4.py", "figures/score.png", "assets/card.jpg",
    "preprocessor_config.json", "training_args.json", "model.onnx", "flax_model.msgpack", "original/consolidated.pth",
    "../config.json", "a/../../tokenizer.json", "/etc/tokenizer.json", ".hidden/tokenizer.json", "x\\tokenizer.json",
]  # fmt: skip
UNSLOTH = [
    *(f"UD-Q2_K_XL/{name}" for name in shards("Flash-Next-UD-Q2_K_XL", 3)),
    *(f"UD-Q4_K_XL/{name}" for name in shards("Flash-Next-UD-Q4_K_XL", 4)),
    "Flash-Next-Q2_K.gguf", "Flash-Next-Q2_K_L.gguf", "mmproj-F16.gguf", "imatrix_unsloth.gguf", "config.json",
]  # fmt: skip


def planned(paths: list[str], *include: str) -> set[str]:
    files = [file for file in listing(*paths) if is_plain(file.path)]
    variant = choose(variants(files), include)
    draft = draft_file(variant, files, include)
    return {file.path for file in (*side_files(variant, files), *variant.files, *([draft] if draft else []))}


def test_a_published_folder():
    assert planned(PUBLISHED + UNWANTED) == set(PUBLISHED)


def test_nothing_else_whatever_the_patterns():
    for pattern in ("*", "*.safetensors", "model-00002*"):
        assert planned(PUBLISHED + UNWANTED, pattern) == set(PUBLISHED)
    for pattern in ("*.bin", "*.py", "*.png", "../*"):
        with pytest.raises(PlanError, match="no model file that matches"):
            planned(PUBLISHED + UNWANTED, pattern)


@pytest.mark.parametrize("paths", [[], UNWANTED, ["config.json", "tokenizer.json"], ["adapter_model.safetensors"]])
def test_repositories_without_a_model(paths):
    with pytest.raises(PlanError, match="nothing to run"):
        planned(paths)


def test_only_what_the_index_names():
    files = listing(*PUBLISHED, "consolidated.safetensors", "experts-00001-of-00002.safetensors", "ngram.safetensors")
    variant = with_index(choose(variants(files)), files, index(*shards("model", 3, "safetensors")))
    assert [file.path for file in variant.files] == [
        "experts-00001-of-00002.safetensors", *shards("model", 3, "safetensors"), "ngram.safetensors",
    ]  # fmt: skip
    assert variant.missing == ()
    lacking = with_index(variant, files, index("model-00001-of-00003.safetensors", "model-9.safetensors"))
    assert lacking.missing == ("model-9.safetensors",)


def test_the_whole_folder_without_an_index():
    files = listing("config.json", "model.safetensors", "mtp.safetensors")
    variant = choose(variants(files))
    assert with_index(variant, files, None) is variant
    assert [file.path for file in variant.files] == ["model.safetensors", "mtp.safetensors"]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "5", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "../x.safetensors"}}',
     '{"weight_map": {"a": "model.bin"}}', '{"weight_map": {"a": "/x.safetensors"}}', "[" * 100_000,
     '{"weight_map": {"a": ["x"]}}', '{"weight_map": {"a": ".safetensors"}}'],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_indices_that_are_none(text):
    files = listing(*PUBLISHED)
    with pytest.raises(PlanError, match=r"model\.safetensors\.index\.json"):
        with_index(choose(variants(files)), files, text)


def test_numbered_files_that_are_missing():
    paths = [path for path in PUBLISHED if "00002-of" not in path]
    assert choose(variants(listing(*paths))).missing == ("model-00002-of-00003.safetensors",)
    assert choose(variants(listing(*shards("q/a", 3)[1:]))).missing == ("q/a-00001-of-00003.gguf",)


def test_a_folder_of_which_only_the_index_is_here():
    files = listing("config.json", "model.safetensors.index.json")
    variant = choose(variants(files), ["model*"])
    assert with_index(variant, files, index("model.safetensors")).missing == ("model.safetensors",)
    assert variant.pattern == "*safetensors*"


# Several models


def test_models_of_a_repository():
    found = variants(listing(*UNSLOTH))
    assert [(v.name, len(v.files)) for v in found] == [
        ("Flash-Next-Q2_K", 1), ("Flash-Next-Q2_K_L", 1), ("Flash-Next-UD-Q2_K_XL", 3), ("Flash-Next-UD-Q4_K_XL", 4),
    ]  # fmt: skip
    with pytest.raises(ChoiceError, match=r"Flash-Next-UD-Q2_K_XL \(3\.0 GB\)") as caught:
        choose(found)
    assert caught.value.variants == tuple(found)


def test_every_pattern_chooses_its_model():
    found = variants(listing(*UNSLOTH))
    assert [variant.pattern for variant in found] == [
        "Flash-Next-Q2_K.gguf", "*Q2_K_L*", "*UD-Q2_K_XL*", "*UD-Q4_K_XL*",
    ]  # fmt: skip
    for variant in found:
        assert choose(found, [variant.pattern]) == choose(found, [exact_pattern(variant)]) == variant


@pytest.mark.parametrize("pattern", ["*UD-Q2_K_XL*", "*ud-q2_k_xl*", "UD-Q2_K_XL/*", "*UD-Q2_K_XL-00002-of-00003.gguf"])
def test_all_shards_of_the_model_that_a_pattern_matches(pattern):
    assert planned(UNSLOTH, pattern) == {f"UD-Q2_K_XL/{name}" for name in shards("Flash-Next-UD-Q2_K_XL", 3)}


def test_patterns_that_match_several_or_none():
    with pytest.raises(ChoiceError) as caught:
        planned(UNSLOTH, "*UD*")
    assert [variant.name for variant in caught.value.variants] == ["Flash-Next-UD-Q2_K_XL", "Flash-Next-UD-Q4_K_XL"]
    with pytest.raises(PlanError, match=r"matches '\*Q9\*'; try --include 'Flash-Next-Q2_K\.gguf'"):
        planned(UNSLOTH, "*Q9*")


def test_names_with_the_marks_of_patterns():
    paths = ["a[1].gguf", "a1.gguf", "a*.gguf"]
    for variant in variants(listing(*paths)):
        assert planned(paths, variant.pattern) == {variant.files[0].path}


def test_tokenizer_files_beside_a_gguf_come_along_and_its_config_does_not():
    paths = ["q.gguf", "config.json", "tokenizer.json", "chat_template.jinja", "other/tokenizer.json"]
    assert planned(paths) == {"q.gguf", "tokenizer.json", "chat_template.jinja"}


def test_safetensors_win_over_gguf_in_the_same_repository_unless_a_pattern_says_otherwise():
    paths = [*PUBLISHED, "model-Q4_0.gguf"]
    assert planned(paths) == set(PUBLISHED)
    assert "model-Q4_0.gguf" in planned(paths, "*.gguf")


def test_folders_of_different_precision():
    paths = [f"{bits}bit/{name}" for bits in (4, 8) for name in PUBLISHED]
    with pytest.raises(ChoiceError):
        planned(paths)
    assert planned(paths, "4bit/*") == {f"4bit/{name}" for name in PUBLISHED}


def test_more_chat_templates():
    extra = "additional_chat_templates/tools.jinja"
    assert extra in planned([*PUBLISHED, extra, "additional_chat_templates/notes.md"])


# The draft layer


def draft(paths: dict[str, int], *include: str) -> str | None:
    files = [RepoFile(path, size) for path, size in paths.items()]
    file = draft_file(choose(variants(files), include), files, include)
    return file and file.path


def test_the_draft_layer_beside_its_model():
    model = {"a-Q2_K.gguf": 40 * GB}
    assert draft(model) is None
    assert draft({**model, "mtp-Q8_0.gguf": 2 * GB, "mtp-BF16.gguf": 4 * GB}) == "mtp-Q8_0.gguf"
    assert draft({**model, "mtp-Q8_0.gguf": 2 * GB, "mtp-BF16.gguf": 4 * GB}, "*Q2*", "*bf16*") == "mtp-BF16.gguf"
    assert draft({"x/a.gguf": 40 * GB, "x/a-MTP.gguf": GB, "mtp.gguf": 1}) == "x/a-MTP.gguf"
    assert draft({"x/a.gguf": 40 * GB, "mtp.gguf": 1}) is None, "the loader looks beside the model"
    assert draft({"x/a.gguf": 40 * GB, "mtp.gguf": 1}, "x/*", "mtp*") == "mtp.gguf"


def test_models_with_a_draft_layer_inside_are_models():
    both = [RepoFile("a-MTP-Q2_K.gguf", 40 * GB), RepoFile("a-MTP-Q4_K.gguf", 60 * GB)]
    assert len(variants(both)) == 2
    assert len(variants([RepoFile("a-Q2_K.gguf", 40 * GB), RepoFile("a-Q2_K-MTP.gguf", 42 * GB)])) == 2


# To show


def test_shards_are_shown_as_one():
    rows = by_numbering(listing(*UNSLOTH))
    assert len(rows["UD-Q4_K_XL/Flash-Next-UD-Q4_K_XL-*-of-00004.gguf"]) == 4
    assert len(rows["config.json"]) == 1


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (66_123_456_789, "66.1 GB")])
def test_sizes(size, text):
    assert human(size) == text


# The start of a GGUF file


def test_the_architecture_from_the_first_bytes():
    whole = encode({"general.architecture": "qwen4exp", "general.name": "x"}, {})
    assert architecture("f", whole) == architecture("f", whole[:80]) == "qwen4exp"
    late = encode({"general.name": "x" * 100, "general.architecture": "llama"}, {})
    assert architecture("f", late) == "llama"
    assert architecture("f", late[:100]) is None, "the bytes end before it"
    assert architecture("f", encode({"general.architecture": 5}, {})) is None
    assert len(whole) < START_BYTES


@pytest.mark.parametrize("start", [b"", b"GGU", b"version https://git-lfs", b"<html>"])
def test_starts_of_other_files(start):
    with pytest.raises(FileFormatError, match="f: is not a GGUF file"):
        architecture("f", start)


def test_any_start_gives_an_answer():
    whole = bytearray(encode({"general.alignment": 32, "general.architecture": "qwen4exp"}, {}))
    for at in range(4, len(whole)):
        for value in (0, 255):
            changed = bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            assert isinstance(architecture("f", changed), (str, type(None)))
