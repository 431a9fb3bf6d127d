"""``mlx-moe plan``: 80 columns, every flag, every kind of model, and the Hub without a download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from checkpoints import random_weights, tiny_config
from gguf_models import tiny_metadata, tiny_tensors, write_gguf
from gguf_writer import encode, shards
from hub_server import Hub, serving
from mlx_moe.cli import main
from mlx_moe.config import ModelConfig
from mlx_moe.description import describe
from mlx_moe.formats.gguf import open_gguf
from mlx_moe.formats.gguf_model import expert_index, model_config
from mlx_moe.paging.sizes import sparse_cache_bytes
from packs import wide_config, write_layout, write_quantized
from real_geometry import real_config, write_real

REPO = "org/real"
AIR = ("--machine", "m5-air-24")


@pytest.fixture
def plan(capsys):
    """Status, lines and standard error of one call; lines have at most 80 columns."""

    def run(*argv: object) -> tuple[int, str, str]:
        status = main(["plan", *map(str, argv)])
        out, err = capsys.readouterr()
        assert "--json" in argv or all(len(line) <= 80 for line in out.splitlines()), out
        return status, out, err

    return run


@pytest.fixture
def numbers(plan):
    """The plan as --json gives it."""

    def run(*argv: object) -> dict[str, Any]:
        return json.loads(plan(*argv, "--json", "-")[1])

    return run


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """The published model's header, 65 GB of holes."""
    return write_real(tmp_path_factory.mktemp("real") / "real.gguf")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    raw = tiny_config(moe_intermediate_size=192)
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return write_gguf(path, raw, random_weights(raw, mtp=True), mtp=True, formats=lambda name: "BF16")


def test_the_real_model_on_an_air(plan, real):
    status, out, err = plan("--model", real, *AIR)
    assert (status, err) == (0, "")
    for text in (
        "GGUF: 48 layers of 512 experts, 10 per token, with draft layer", "dense weights", "keys and index keys",
        "snapshots", "n-gram row cache", "1.18 MB to 1.51 MB each", "left for the system", "It fits.", "Estimate:",
        "SSD 6.5 GB/s, memory 132 GB/s, 190 µs per wait", "LRU", "tokens/s at most",
        "pieces of 2,048", "pieces of 8,192",
    ):  # fmt: skip
        assert text in out, text
    assert "sysctl" not in out and "swap" not in out


def test_sizes_are_the_files(numbers, real):
    found, file = numbers("--model", real, *AIR), open_gguf(real)
    config = ModelConfig.from_dict(model_config(file))
    assert found["record_bytes"] == [layer.record_bytes for layer in expert_index(file, config).layers]
    assert len(set(found["record_bytes"])) == 3
    dense = sum(size for name, (_, size) in describe(real).dense.items() if not name.startswith("mtp."))
    assert 0.95 * dense < found["parts"]["dense"] <= dense, "F32 matrices become bfloat16"
    assert found["total_bytes"] == sum(found["parts"].values()) <= found["ceiling_bytes"]
    assert 150 < found["slots"] < 180
    assert found["estimate"]["cold_bytes"] == describe(real).token_bytes["experts"] + 1440


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (("--memory", "12GB"), "ceiling_bytes"),
        (("--expert-slots", "20"), "slots"),
        (("--context", "4096"), "parts"),
        (("--snapshots", "0"), "parts"),
        (("--prefill-step-size", "512"), "parts"),
        (("--dtype", "float32"), "parts"),
        (("--mtp", "none"), "record_bytes"),
        (("--simulate-ram", "32GiB"), "machine"),
        (("--machine", "m2-16"), "machine"),
        (("--ssd-gb-s", "3"), "speeds"),
        (("--memory-gb-s", "90.5"), "speeds"),
        (("--wait-us", "60"), "estimate"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_every_flag_changes_something(numbers, real, flags, changed):
    before, after = (numbers("--model", real, *AIR, *more) for more in ((), flags))
    assert before[changed] != after[changed]


def test_flags_change_what_they_say(numbers, real):
    before = numbers("--model", real, *AIR)
    assert numbers("--model", real, *AIR, "--snapshots", 3)["parts"]["snapshot"] == 3 * before["parts"]["snapshot"]
    assert numbers("--model", real, *AIR, "--dtype", "float32")["parts"]["kv"] == 2 * before["parts"]["kv"]
    assert numbers("--model", real, *AIR, "--mtp", "none")["parts"]["mtp"] == 0
    slow = numbers("--model", real, *AIR, "--ssd-gb-s", "3.25")["estimate"]
    assert slow["misses_s"] == pytest.approx(2 * before["estimate"]["misses_s"])
    simulated = numbers("--model", real, *AIR, "--simulate-ram", "16GiB")
    assert simulated["machine"] == {"memory_bytes": 16 << 30, "working_set_bytes": 12 << 30}
    assert simulated["speeds"] == before["speeds"], "the machine's speeds stay"


def test_json_into_a_file(plan, numbers, real, tmp_path):
    status, out, _ = plan("--model", real, *AIR, "--json", tmp_path / "plan.json")
    assert status == 0 and "It fits." in out
    assert json.loads((tmp_path / "plan.json").read_text()) == numbers("--model", real, *AIR)
    status, out, err = plan("--model", real, "--json", tmp_path / "no" / "plan.json")
    assert (status, out) == (1, "") and "its folder does not exist" in err


def test_the_wired_limit(plan, real):
    status, out, _ = plan("--model", real, *AIR, "--memory", "22GB")
    assert status == 0 and "more for the GPU than Metal advises" in out
    limit = int(out.split("sudo sysctl iogpu.wired_limit_mb=")[1].split()[0])
    assert 18432 < limit < 22000
    _, out, _ = plan("--model", real, *AIR, "--memory", "25.7GB")
    assert "The ceiling is lower than was asked for" in out


def test_what_does_not_fit(plan, real):
    status, out, _ = plan("--model", real, "--simulate-ram", "12GiB", "--context", "131072")
    assert status == 1 and "It does not fit: " in out and "tokens/s" not in out and "sysctl" not in out
    for text in ("--context 65536", "a quantisation with dense weights of", "a machine with 14 GiB of memory"):
        assert text in out, out
    assert plan("--model", real, "--simulate-ram", "12GiB", "--context", "65536")[0] == 0
    assert plan("--model", real, "--simulate-ram", "14GiB", "--context", "131072")[0] == 0


def test_slots_that_do_not_fit(plan, numbers, real):
    status, out, _ = plan("--model", real, *AIR, "--expert-slots", 400)
    best = numbers("--model", real, *AIR)["slots"]
    assert status == 1 and f"  --expert-slots {best}\n" in out


def test_kinds_of_models(plan, numbers, tiny, tmp_path, capsys):
    status, out, _ = plan()
    assert status == 0 and "the demonstration model" in out and "with all experts in memory" in out
    pack = tmp_path / "pack"
    assert main(["convert", "--model", str(tiny), "--out", str(pack)]) == 0
    capsys.readouterr()
    gguf, packed = numbers("--model", tiny), numbers("--model", pack)
    assert gguf["parts"] == packed["parts"] and gguf["record_bytes"] == packed["record_bytes"]
    folder = write_layout(tmp_path / "hf", wide_config(), "fp8", mtp=True)
    assert numbers("--model", folder)["slots"] == 5


def test_no_experts_on_disk_where_they_do_not_stream(plan, tmp_path):
    folder = write_quantized(tmp_path / "packed", wide_config(), tmp_path / "plain")
    status, out, _ = plan("--model", folder, "--memory", "300MB")
    assert status == 1 and "do not stream" in out and "mlx-moe convert" in out


def test_this_machine(plan, numbers, tiny, monkeypatch):
    from mlx_moe import platform

    here = platform.Device("Apple M9", "", 16 << 30, 11 * 10**9)
    monkeypatch.setattr(platform, "device", lambda: here)
    assert numbers("--model", tiny)["machine"] == {"memory_bytes": 16 << 30, "working_set_bytes": 11 * 10**9}
    assert "Metal advises at most 11.00 GB" in plan("--model", tiny)[1]


def test_a_draft_layer_of_its_own(numbers, plan, tmp_path):
    raw = tiny_config()
    weights = random_weights(raw, mtp=True)
    trunk = {name: value for name, value in weights.items() if not name.startswith("mtp.")}
    model = write_gguf(tmp_path / "a" / "model.gguf", raw, trunk)
    both = write_gguf(tmp_path / "b" / "both.gguf", raw, weights, mtp=True)
    alone, joined = numbers("--model", model), numbers("--model", model, "--mtp", both)
    assert alone["parts"]["mtp"] == 0 and joined["parts"] == numbers("--model", both)["parts"]
    assert joined["parts"]["mtp"] > sparse_cache_bytes(ModelConfig.from_dict(raw), 4096, 2)
    status, out, err = plan("--model", both, "--mtp", model)
    assert (status, out) == (1, "") and "holds no draft layer" in err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--memory", "12"), "is not a size"), (("--simulate-ram", "0GB"), "is not a size"),
        (("--context", "0"), "above 0"), (("--expert-slots", "x"), "above 0"), (("--ssd-gb-s", "0"), "above 0"),
        (("--memory-gb-s", "nan"), "above 0|0 or more"), (("--wait-us", "-1"), "0 or more"),
        (("--machine", "m9"), "invalid choice"), (("stray",), "unrecognized"),
    ],
)  # fmt: skip
def test_errors_of_use(capsys, argv, text):
    with pytest.raises(SystemExit) as error:
        main(["plan", *argv])
    err = capsys.readouterr().err
    assert error.value.code == 2 and err.count("\n") == 1 and any(part in err for part in text.split("|")), err


def test_problems_are_one_line(plan, real, tmp_path):
    for argv, text in (
        (("--model", tmp_path / "nothing.gguf"), "no such file"),
        (("--model", tmp_path), "no GGUF model"),
        (("--model", real, "--context", 300_000), "at most 262144"),
        (("--model", real, "--snapshots", -1), "snapshots is -1"),
        (("--model", real, *AIR, "--expert-slots", 9), "allowed: 10 to"),
    ):
        status, out, err = plan(*argv)
        assert (status, out) == (1, "") and text in err and err.count("\n") == 1


# A repository of the Hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serving(Hub()) as hub:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def test_a_checkpoint_on_the_hub(hub, numbers, tmp_path):
    folder = write_layout(tmp_path / "hf", wide_config(), "fused", mtp=True)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repos[REPO] = {**files, "x.bin": bytes(1 << 20)}
    there, here = numbers("--model", REPO), numbers("--model", folder)
    assert {**there, "model": ""} == {**here, "model": ""}
    assert "x.bin" not in hub.fetched and not (tmp_path / "cache").exists()


def test_a_gguf_with_a_vocabulary_on_the_hub(hub, numbers, plan, tiny):
    """Only the start of the file is fetched, as far as its header reaches; of two models one has to be chosen."""
    raw = tiny_config(moe_intermediate_size=192)
    tensors = tiny_tensors(raw, random_weights(raw, mtp=True), formats=lambda name: "BF16")
    words = {"tokenizer.ggml.tokens": [f"word {i} of the vocabulary" for i in range(6000)]}
    file = encode({**tiny_metadata(raw, mtp=True), **words}, tensors) + bytes(48 << 20)
    hub.repos[REPO] = {"q/model-Q8.gguf": file, "q/model-Q4.gguf": file}
    status, _, err = plan("--model", REPO)
    assert status == 1 and "holds 2 models" in err and "--include" in err
    found = numbers("--model", REPO, "--include", "*Q4*")
    assert found["parts"] == numbers("--model", tiny)["parts"]
    assert hub.fetched == {"q/model-Q4.gguf"}
    assert hub.served["q/model-Q4.gguf"] < 24 << 20, "the sockets' buffers take more than what is read"


def test_shards_on_the_hub(hub, numbers, tiny):
    raw = tiny_config(moe_intermediate_size=192)
    tensors = tiny_tensors(raw, random_weights(raw, mtp=True), formats=lambda name: "BF16")
    parts = shards(tiny_metadata(raw, mtp=True), tensors, 12)
    hub.repos[REPO] = {f"m-{i:05d}-of-00012.gguf": part for i, part in enumerate(parts, 1)}
    assert numbers("--model", REPO)["parts"] == numbers("--model", tiny)["parts"]


def test_problems_on_the_hub_are_one_line(hub, plan):
    hub.repos[REPO] = {"config.json": json.dumps(real_config()).encode(), "model.safetensors": b"123"}
    for argv, text in (
        (("org/none",), "no such repository"),
        ((REPO,), REPO),
        ((REPO, "--revision", "v9"), "has no revision 'v9'"),
        ((REPO, "--include", "*x*"), "matches '*x*'"),
    ):
        status, out, err = plan("--model", *argv)
        assert (status, out) == (1, "") and text in err and err.count("\n") == 1 and "headers-" not in err, err
