"""Folders whose experts stream: the bits of the folder with all in memory, and no expert is ever an array."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from checkpoints import write
from custom_kernels import dispatch
from disks import read_with, slow
from folders import EXPERTS, KINDS, TOP_K, decoded, folder_config, folder_weights, write_folder
from mlx_moe import load_model, runtime, streaming
from mlx_moe.cli import main
from mlx_moe.config import ConfigError
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.model_sizes import local_sizes
from mlx_moe.models.qwen4_exp import sanitize
from mlx_moe.paging.moce import MoceConfig
from mlx_moe.paging.plan import SYSTEM_BYTES
from mlx_moe.paging.resident import ResidentExperts, ResidentRows
from mlx_moe.paging.rows import FileRows
from packs import write_quantized
from paging.streamed import IDS, ceiling, greedy, logits, opened, readers

LIMIT = 1e-4
TABLE = "model.layers.0.ple.ple_embedding.ngram_embedding"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders by kind, with a draft layer, written once."""
    root, made = tmp_path_factory.mktemp("folders"), {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = write_folder(root / kind, kind, mtp=True)
        return made[kind]

    return get


def near(got: np.ndarray, want: np.ndarray) -> bool:
    return np.abs(got - want).max() <= LIMIT * np.abs(want).max()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_output_does_not_depend_on_the_arena(folders, kind):
    """Any number of slots; and as near to the arrays of all experts as sums allow."""
    with load_model(folders(kind), mx.float32)[0] as arrays:
        assert isinstance(arrays._experts, ResidentExperts) and isinstance(arrays._rows, ResidentRows)
        plain, text = logits(arrays), greedy(arrays, 6)
    with load_model(folders(kind), mx.float32, resident=True)[0] as model:
        assert isinstance(model._rows, FileRows) and model.experts_stats.slots == EXPERTS
        want = logits(model)
        assert near(want, plain) and model.experts_stats.misses == 0
    with opened(folders(kind), TOP_K) as model:
        assert np.array_equal(logits(model), want) and model.experts_stats.misses > 0
        model.resize_experts(8)
        assert greedy(model, 6) == text


@pytest.mark.full
@pytest.mark.parametrize(("slots", "threads", "ahead"), [(TOP_K, 8, True), (4, 2, False), (5, 1, True), (8, 1, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_output_under_delays(folders, monkeypatch, kind, slots, threads, ahead):
    """Nor on threads, read-ahead, slow disks and resizes."""
    with load_model(folders(kind), mx.float32, resident=True)[0] as model:
        want, text = logits(model), greedy(model, 6)
    with opened(folders(kind), slots, io_threads=threads, read_ahead=ahead) as model:
        slow(monkeypatch, 0.002, slots)
        assert np.array_equal(logits(model), want) and greedy(model, 6) == text
        model.resize_experts(EXPERTS - slots)
        assert np.array_equal(logits(model), want) and model.experts_stats.misses > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["BF16 fused", "FP8, F32 scales", "mixed"])
def test_values_are_those_of_the_file(tmp_path, folders, kind):
    """Against a folder of float32 numbers that another decoder made of the same bytes."""
    plain = write(tmp_path / "plain", folder_config(), decoded(kind))
    with load_model(plain, mx.float32)[0] as whole, opened(folders(kind), 4) as model:
        assert near(logits(model), logits(whole))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["BF16 per expert", "FP8"])
def test_drafts_and_batches(folders, kind):
    with opened(folders(kind), 4) as model, opened(folders(kind), EXPERTS) as whole:
        ids = mx.array(np.stack([IDS[i : i + 5] for i in range(4)]))
        assert mx.array_equal(model(ids), whole(ids))
        streams = whole.streams(mx.array(IDS[None, :12]))
        drafts = [m.draft(streams, mx.array(IDS[None, 1:13]), m.mtp.make_cache())[0] for m in (model, whole)]
        assert mx.array_equal(*drafts)


@pytest.mark.sample(1)
@pytest.mark.parametrize("slots", [8, 12])
def test_the_oracle(oracle, slots):
    stored = np.load(oracle / "oracle.npz")
    ids = stored["tokens"][None] if stored["tokens"].ndim == 1 else stored["tokens"]
    with load_model(oracle / "hf", mx.float32)[0] as arrays, opened(oracle / "hf", slots) as model:
        assert near(*(np.array(m(mx.array(ids)))[0] for m in (model, arrays)))
        assert model.experts_stats.misses > 0
        assert greedy(model, 12) == greedy(arrays, 12)


def test_experts_and_rows_are_never_arrays(folders, monkeypatch):
    """What is made of tensors is the dense weights; what is read of experts is what was missing."""
    seen, real = set(), sanitize.sanitize
    monkeypatch.setattr(sanitize, "sanitize", lambda tensors, *rest: seen.update(tensors) or real(tensors, *rest))
    with opened(folders("FP8"), 4, read_ahead=False) as model:
        assert seen and not [name for name in seen if ".mlp.experts." in name or "ngram_embedding" in name]
        held = sum(value.nbytes for value in runtime.named_parameters(model).values())
        assert held < 4 * sum(np.array(v).size for n, v in folder_weights("FP8").items() if ".experts." in n) / 2
        mx.eval(model.streams(mx.array(IDS[None, :20])))
        stats, record = model.experts_stats, model._experts._pager._layers[0].record_bytes
        assert record == 3 * (192 * 256 + 16) - 8 and stats.bytes_read == stats.misses * record > 0


# Who streams


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["BF16 fused", "FP8", "F32 per expert"])
def test_what_does_not_fit_streams(folders, monkeypatch, caplog, kind):
    """Without options: arrays where they fit; else as many as there is room for; else one line."""
    folder = folders(kind)
    for slots in (TOP_K, 7):
        machine = SimpleNamespace(memory_bytes=ceiling(folder, slots) + SYSTEM_BYTES, working_set_bytes=None)
        monkeypatch.setattr(streaming, "device", lambda machine=machine: machine)
        with caplog.at_level(logging.INFO), load_model(folder, mx.float32)[0] as model:
            assert model.experts_stats.slots == slots
        assert f"{slots} of {EXPERTS} experts per layer in memory" in caplog.text
    machine.memory_bytes = ceiling(folder, TOP_K) + SYSTEM_BYTES - 1
    with pytest.raises(ValueError, match=r"GB are needed for 3 experts .* may be used; .* machine has 3.\d GB"):
        load_model(folder, mx.float32)
    monkeypatch.undo()
    with load_model(folder, mx.float32)[0] as model:
        assert model.experts_stats is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["FP8, F32 scales", "mixed"])
def test_the_plan_and_the_loader_agree(folders, capsys, kind):
    """Slots, and bytes of records with their scales; info says the same of the files."""
    folder = folders(kind)
    for slots in (TOP_K, 7, EXPERTS):
        size = f"{ceiling(folder, slots) / 1e6 + 0.001:.3f}MB"
        assert main(["plan", "--model", str(folder), "--dtype", "float32", "--memory", size, "--json", "-"]) == 0
        plan = json.loads(capsys.readouterr().out)
        with load_model(folder, mx.float32, memory=size)[0] as model:
            assert model.experts_stats.slots == plan["slots"] == slots
            assert [entry.record_bytes for entry in model._experts._pager._layers] == plan["record_bytes"]
    assert main(["info", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    weights, scales = 192 * 256, 2 * 2
    sizes = [3 * (weights + 4 * scales)] * 3
    if kind == "mixed":
        sizes = [6 * weights, 2 * (weights + 2 * scales) + 2 * weights, 6 * weights]
    assert said["expert_bytes"] == EXPERTS * sum(sizes) and said["in_memory"] is None
    assert said["cold_token_bytes"]["experts"] == TOP_K * sum(sizes[:2])


def test_the_plan_of_what_fits_is_that_of_arrays(folders, capsys):
    """The loader keeps such a folder in memory, as numbers of the type to compute in, with its table."""
    for flags, record in (([], 3 * 192 * 256 * 4), (["--expert-slots", "12"], 3 * 192 * 256 * 2)):
        arguments = ["plan", "--model", str(folders("BF16 fused")), "--dtype", "float32", *flags, "--json", "-"]
        assert main(arguments) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["record_bytes"] == [record] * 3 and plan["slots"] == EXPERTS
        assert (plan["parts"]["row_cache"] > 0) == bool(flags)


def test_sizes_need_headers_alone(tmp_path, folders):
    """As of a repository on the Hub, of which nothing else is here: contents are holes, constants of the hash too."""
    name = f"{TABLE.removesuffix('.ngram_embedding')}.layer_multipliers"
    folder = write_folder(tmp_path / "m", "FP8", mtp=True, **{name: np.array([1, 3, 5])})
    with pytest.raises(ConfigError, match="layer_multipliers in the file is not what"):
        load_model(folder, mx.float32, expert_slots=4)
    for path in folder.glob("*.safetensors"):
        size, data = path.stat().st_size, path.read_bytes()
        path.write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
        os.truncate(path, size)
    assert local_sizes(folder, 4) == local_sizes(folders("FP8"), 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_type_to_compute_in(folders, dtype):
    with load_model(folders("FP8"), dtype, expert_slots=4)[0] as model:
        few = model(mx.array(IDS[None, :6]))
        assert few.dtype == dtype
    with load_model(folders("FP8"), dtype, resident=True)[0] as model:
        assert mx.array_equal(model(mx.array(IDS[None, :6])), few)


def test_without_a_draft_layer(folders):
    with load_model(folders("BF16 fused"), mx.float32, expert_slots=4, mtp=None)[0] as model:
        assert not model.has_mtp and len(model._experts._pager._layers) == 2
        assert np.isfinite(logits(model, (10, 1))).all()


def test_cache_aware_routing(folders):
    with load_model(folders("FP8"), mx.float32, moce=MoceConfig())[0] as model:
        assert model.experts_stats.slots == EXPERTS
        model.resize_experts(4)
        assert len(greedy(model, 2)) == 2


def test_packed_by_mlx(tmp_path):
    folder = write_quantized(tmp_path / "m", folder_config(), tmp_path / "source")
    for name, value in {"memory": "10GB", "expert_slots": 4, "moce": MoceConfig()}.items():
        with pytest.raises(ValueError, match=f"{name} cannot be used: experts packed by mx.quantize .*mlx-moe convert"):
            load_model(folder, **{name: value})
    with load_model(folder, resident=True)[0] as model:
        assert model.experts_stats is None
        with pytest.raises(ValueError, match="not streamed"):
            model.resize_experts(4)


@pytest.mark.parametrize("options", [{"memory": "10GB"}, {"resident": True}])
def test_lazy_and_streaming(folders, options):
    with pytest.raises(ValueError, match=f"lazy and {next(iter(options))} were both given; leave one out"):
        load_model(folders("FP8"), lazy=True, **options)


def test_what_cannot_be_packed_or_saved(folders, tmp_path):
    with opened(folders("BF16 fused"), 4) as model:
        for change in (lambda: runtime.quantize_model(model), lambda: runtime.save_model(tmp_path / "x", model, {})):
            with pytest.raises(ValueError, match="experts stand in memory as their files have them cannot be"):
                change()


# Faults


GATE = "model.layers.1.mlp.experts.7.gate_proj"


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        ("FP8", {f"{GATE}.weight_scale_inv": None}, ConfigError, "expert 7: its FP8 scales are missing"),
        ("FP8", {f"{GATE}.weight_scale_inv": mx.array([[2.0]])}, ValueError,
         "expert_slots cannot be used: model.layers.1.mlp.experts.7.gate_proj has F32 scales .*mlx-moe convert"),
        ("BF16 per expert", {f"{GATE}.weight": mx.ones((9, 9), mx.bfloat16)}, ConfigError,
         r"gate_proj of expert 7 is BF16 \(9, 9\), needed BF16 \(192, 256\) \(model-0000"),
        ("BF16 fused", {"lm_head.weight": None}, FileFormatError, "1 tensor.s. missing, first lm_head.weight"),
    ],
)  # fmt: skip
def test_faults_are_named_before_anything_is_read(tmp_path, monkeypatch, kind, changes, error, message):
    folder = write_folder(tmp_path / "m", kind, **changes)
    read_with(monkeypatch, lambda *_: pytest.fail("an expert was read"))
    with pytest.raises(error, match=message) as caught:
        load_model(folder, mx.float32, expert_slots=4)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_single_scale_needs_no_arena(tmp_path):
    """What cannot be read in place is loaded as before, when nothing else is asked."""
    folder = write_folder(tmp_path / "m", "FP8", **{f"{GATE}.weight_scale_inv": mx.array([[0.01]])})
    with load_model(folder, mx.float32)[0] as model:
        assert isinstance(model._experts, ResidentExperts) and np.isfinite(logits(model)).all()


def test_a_file_that_changes(tmp_path):
    folder = write_folder(tmp_path / "m", "FP8")
    with opened(folder, 4) as model:
        model(mx.array(IDS[None, :3]))
        for path in folder.glob("*.safetensors"):
            os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(OSError, match=r"model-0000\d-of-00003.safetensors: .* cannot be read") as caught:
            model(mx.array(IDS[None]))
        assert "\n" not in str(caught.value) and not readers()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["FP8", "FP8, F32 scales", "BF16 fused", "mixed"])
def test_through_the_kernels(simulated_gpu, folders, kind):
    """The Metal text reads matrices, scales and rows of the records, after its own checks have passed."""
    with dispatch.forced("reference"), opened(folders(kind), 4) as model:
        want = np.array(model(mx.array(IDS[None, :3])))
    with opened(folders(kind), 4) as model:
        assert near(np.array(model(mx.array(IDS[None, :3]))), want) and model.experts_stats.misses > 0
    verdicts = (simulated_gpu / "verdicts.json").read_text()
    assert '"ok": false' not in verdicts and "expert_gate_up" in verdicts and "expert_down" in verdicts
