"""Verdicts of kernels: checked once per machine, remembered, never trusted; and what a failure does to a text."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from checkpoints import random_weights, tokens, write
from custom_kernels import dispatch
from custom_kernels.checks import Verdict
from mlx_moe import environment, generate_tokens, load_model, platform, runtime, verdicts
from simulated import WRONG_BASE, change_kernel
from tiny_tokenizer import short_config

GOOD, BAD = Verdict(True, 2e-7), Verdict(False, 0.5, message="window of 1, float32: out is off by 5.0e-01")
STEP, COMMIT, ROUTE = ("gdn_step", ""), ("gdn_commit", ""), ("moce_route", "")
ALL = {STEP, COMMIT, ROUTE}


@pytest.fixture
def gpu(monkeypatch, tmp_path) -> Path:
    """A machine with a GPU that is never asked anything; returns the verdict file."""
    monkeypatch.setattr(dispatch, "device_choice", lambda: dispatch.Choice("metal", "an imagined GPU"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    restart(monkeypatch)
    return tmp_path / "mlx_moe" / "verdicts.json"


def restart(monkeypatch) -> None:
    """Forget what a new process would not know."""
    monkeypatch.setattr(dispatch, "_disabled", {})


@pytest.fixture
def failing() -> set[tuple[str, str]]:
    """Kernels that fail from now on."""
    return set()


@pytest.fixture
def checked(monkeypatch, failing) -> list[tuple[str, str]]:
    """(op, variant) of every check that was run; none really runs."""
    calls: list[tuple[str, str]] = []

    def run(one, backend, calls_to_time=0):
        calls.append((one.op, one.variant))
        return BAD if calls[-1] in failing else GOOD

    monkeypatch.setattr(verdicts, "run_check", run)
    return calls


def backends() -> dict[str, str]:
    return {op: dispatch.choose(op).backend for op, _ in ALL}


# When a kernel is checked


def test_once_per_machine(gpu, checked):
    verdicts.require_kernels(ALL)
    assert sorted(checked) == sorted(ALL)
    verdicts.require_kernels(ALL)
    assert len(checked) == 3, "the second load checks nothing"
    verdicts.require_kernels({STEP, ("block_gemv", "IQ2_XS"), ("expert_gate_up", "IQ2_XS+IQ4_NL")})
    assert checked[3:] == [("block_gemv", "IQ2_XS"), ("expert_gate_up", "IQ2_XS+IQ4_NL")], "only what is new"
    assert [item.name for item in gpu.parent.iterdir()] == ["verdicts.json"]
    assert set(verdicts.read_verdicts().values()) == {GOOD}


@pytest.mark.parametrize("what", ["mlx", "device", "text", "back end"])
def test_again_on_another_machine_or_for_another_kernel(gpu, checked, monkeypatch, what):
    verdicts.require_kernels(ALL)
    if what == "mlx":
        monkeypatch.setattr(mx, "__version__", "0.99.0")
    elif what == "device":
        monkeypatch.setattr(verdicts, "device", lambda: replace(platform.device(), name="Apple M9"))
    elif what == "back end":
        monkeypatch.setattr(dispatch, "device_choice", lambda: dispatch.Choice("cuda", "an imagined GPU"))
    else:
        change_kernel(monkeypatch, "moce_route", header="// edited\n")
    expected = {ROUTE} if what == "text" else ALL
    verdicts.require_kernels(ALL)
    assert set(checked[3:]) == expected and len(checked) == 3 + len(expected)
    monkeypatch.undo()
    assert len(json.loads(gpu.read_text())["verdicts"]) == len(checked), "the verdicts before are kept"


def test_on_a_cpu_nothing_is_checked_and_nothing_is_written(gpu, checked, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "device_choice", lambda: dispatch.Choice("reference", "MLX runs on the CPU"))
    verdicts.require_kernels(ALL)
    assert not checked and not gpu.parent.exists() and not caplog.records
    findings = verdicts.examine([ROUTE])
    assert findings[0].verdict.ok and findings[0].verdict.error is None and findings[0].verdict.microseconds > 0
    assert not checked and not gpu.parent.exists()


def test_loading_requires_the_kernels_of_the_model(gpu, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(runtime, "require_kernels", lambda kernels: asked.append(set(kernels)))
    raw = short_config()
    load_model(write(tmp_path / "m", raw, random_weights(raw)), mx.float32)
    assert asked == [ALL]


def test_unknown_kernels_are_refused(gpu):
    with pytest.raises(ValueError, match="'gdn' has no kernel"):
        verdicts.require_kernels({("gdn", "")})


# What a failure does


def test_a_failed_kernel_falls_back_with_a_warning_in_every_process(gpu, checked, failing, monkeypatch, caplog):
    failing.add(ROUTE)
    verdicts.require_kernels(ALL)
    assert backends() == {"moce_route": "reference", "gdn_step": "metal", "gdn_commit": "metal"}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for word in ("moce_route falls back", BAD.message, "mlx-moe doctor"):
        assert word in caplog.text
    verdicts.require_kernels(ALL)
    assert len(caplog.records) == 1, "one warning, however many models"
    restart(monkeypatch)
    caplog.clear()
    failing.clear()
    verdicts.require_kernels(ALL)
    assert dispatch.choose("moce_route").backend == "reference" and len(checked) == 3, "the verdict is remembered"
    assert len(caplog.records) == 1


def test_only_the_variant_that_failed_falls_back(gpu, checked, failing):
    failing.add(("block_gemv", "IQ2_XS"))
    verdicts.require_kernels({("block_gemv", "IQ2_XS"), ("block_gemv", "Q8_0")})
    assert dispatch.choose("block_gemv", "IQ2_XS").backend == "reference"
    assert dispatch.choose("block_gemv", "Q8_0").backend == "metal"


@pytest.mark.parametrize("bad", [STEP, COMMIT])
def test_steps_and_their_replay_fall_back_together(gpu, checked, failing, bad):
    """Otherwise a rollback would not give the bits of the steps."""
    failing.add(bad)
    verdicts.require_kernels(ALL)
    assert backends() == {"moce_route": "metal", "gdn_step": "reference", "gdn_commit": "reference"}


def test_examining_checks_anew_and_replaces_what_was_remembered(gpu, checked, failing, monkeypatch):
    failing.add(STEP)
    verdicts.require_kernels(ALL)
    failing.clear()
    restart(monkeypatch)
    named = []
    findings = verdicts.examine(ALL, progress=named.append)
    assert len(checked) == 6 and named == [op for op, _ in ALL]
    assert all(finding.backend == "metal" and finding.reason == "an imagined GPU" for finding in findings)
    verdicts.require_kernels(ALL)
    assert len(checked) == 6 and set(backends().values()) == {"metal"}


# The file

HOSTILE = {
    "empty": b"",
    "not JSON": b"{'a': 1}",
    "not text": b"\xff\xfe\x00{}",
    "nested": b"[" * 100_000,
    "a list": b"[]",
    "a number": b"1" * 5000,
    "another format": b'{"format": "mlx_moe verdicts 2", "verdicts": {}}',
    "no verdicts": b'{"format": "mlx_moe verdicts 1"}',
    "verdicts of another kind": b'{"format": "mlx_moe verdicts 1", "verdicts": [1]}',
    "too large": b'{"format": "mlx_moe verdicts 1", "verdicts": {}}' + b" " * verdicts.MAX_BYTES,
    **{
        f"entry {text}": f'{{"format": "mlx_moe verdicts 1", "verdicts": {{"KEY": {text}}}}}'.encode()
        for text in (
            "true",
            '{"ok": 1, "error": null, "microseconds": null, "message": ""}',
            '{"ok": true, "error": "0", "microseconds": null, "message": ""}',
            '{"ok": true, "error": NaN, "microseconds": null, "message": ""}',
            '{"ok": true, "error": 0.0, "microseconds": -1.0, "message": ""}',
            '{"ok": true, "error": 0.0, "microseconds": null, "message": 5}',
            '{"ok": true, "more": 0}',
            '{"error": 0.0}',
            '{"ok": true, "error": 1' + "0" * 400 + "}",
        )
    },
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_is_not_ours_is_ignored_with_one_warning_and_replaced(gpu, checked, caplog, content):
    verdicts.require_kernels({ROUTE})
    (key,) = json.loads(gpu.read_text())["verdicts"]
    gpu.write_bytes(content.replace(b"KEY", key.encode()))
    verdicts.require_kernels({ROUTE})
    assert len(checked) == 2, "nothing of it counts"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "is ignored" in warnings[0] and "\n" not in warnings[0] and len(warnings[0]) < 500
    verdicts.require_kernels({ROUTE})
    assert len(checked) == 2 and len(caplog.records) == 1


def test_a_stored_message_cannot_control_the_terminal(gpu, checked, caplog):
    verdicts.require_kernels({ROUTE})
    content = json.loads(gpu.read_text())
    (entry,) = content["verdicts"].values()
    entry.update(ok=False, message="\x1b[2J\nall is well " + "x" * 10_000)
    gpu.write_text(json.dumps(content))
    verdicts.require_kernels({ROUTE})
    (record,) = caplog.records
    assert record.getMessage().isprintable() and len(record.getMessage()) < 600


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_what_is_not_a_file_is_not_read(gpu, checked, caplog, kind):
    gpu.parent.mkdir()
    gpu.mkdir() if kind == "folder" else os.mkfifo(gpu)
    verdicts.require_kernels({ROUTE})
    assert checked == [ROUTE] and "not a file" in caplog.text


def test_a_folder_that_cannot_be_written(gpu, checked, monkeypatch, caplog):
    gpu.parent.write_text("in the way")
    for _ in range(2):
        verdicts.require_kernels({ROUTE})
    assert len(checked) == 2 and not caplog.records
    gpu.parent.unlink()

    def refuse(path, value):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(verdicts, "write_json", refuse)
    verdicts.require_kernels({ROUTE})
    assert len(checked) == 3 and not gpu.exists() and not caplog.records


def test_nothing_is_remembered_without_a_home(gpu, checked, monkeypatch):
    monkeypatch.setattr(verdicts, "cache_folder", lambda: None)
    for _ in range(2):
        verdicts.require_kernels({ROUTE})
    assert len(checked) == 2 and not gpu.parent.exists()


def test_what_another_process_adds_meanwhile_is_kept(gpu, checked, monkeypatch):
    run = verdicts.run_check

    def slow(one, *rest):
        verdicts.remember({"of another process": BAD})
        return run(one, *rest)

    monkeypatch.setattr(verdicts, "run_check", slow)
    verdicts.require_kernels({ROUTE})
    assert len(verdicts.read_verdicts()) == 2 and verdicts.read_verdicts()["of another process"] == BAD


def test_the_file_is_bounded_and_the_newest_stay(gpu, monkeypatch):
    monkeypatch.setattr(verdicts, "MAX_VERDICTS", 3)
    for name in "abcad":
        verdicts.remember({name: GOOD})
    assert list(verdicts.read_verdicts()) == ["c", "a", "d"]


@pytest.mark.parametrize(
    ("variable", "home", "want"),
    [
        ("/x/y", "/home/u", "/x/y/mlx_moe"),
        ("", "/home/u", "/home/u/.cache/mlx_moe"),
        (None, "/home/u", "/home/u/.cache/mlx_moe"),
        ("relative", "/home/u", "/home/u/.cache/mlx_moe"),
    ],
)
def test_cache_folder(monkeypatch, variable, home, want):
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert environment.cache_folder() == Path(want)


def test_cache_folder_of_a_user_without_a_home(monkeypatch):
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(environment.Path, "home", unknown)
    assert environment.cache_folder() is None


# A model on a GPU (simulated)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    raw = short_config()
    return write(tmp_path_factory.mktemp("model"), raw, random_weights(raw, seed=2))


def greedy(folder: Path) -> list[int]:
    """The continuation of a short prompt by a newly loaded model."""
    model = load_model(folder, mx.float32)[0]
    return [token for token, _ in generate_tokens(tokens(12).tolist(), model, max_tokens=6)]


@pytest.fixture(scope="module")
def reference_text(folder) -> list[int]:
    with dispatch.forced("reference"):
        return greedy(folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize("op", ["gdn_step", "moce_route"])
def test_a_broken_kernel_falls_back_and_the_text_stays(simulated_gpu, monkeypatch, caplog, folder, reference_text, op):
    change_kernel(monkeypatch, op, header=WRONG_BASE)
    assert greedy(folder) == reference_text
    assert f"{op} falls back to its reference: its kernel failed the check" in caplog.text
    assert dispatch.choose(op).backend == "reference"


@pytest.mark.full
def test_without_the_check_the_broken_kernel_would_write_another_text(
    simulated_gpu, monkeypatch, folder, reference_text
):
    change_kernel(monkeypatch, "gdn_step", header=WRONG_BASE)
    monkeypatch.setattr(runtime, "require_kernels", lambda kernels: None)
    assert greedy(folder) != reference_text


def test_good_kernels_pass_and_the_second_load_checks_nothing(
    simulated_gpu, monkeypatch, caplog, folder, reference_text
):
    assert greedy(folder) == reference_text
    assert not caplog.records and set(backends().values()) == {"metal"}
    remembered = (simulated_gpu / "verdicts.json").read_bytes()
    run = verdicts.run_check
    ran = []
    monkeypatch.setattr(verdicts, "run_check", lambda one, *rest: ran.append(one.op) or run(one, *rest))
    load_model(folder, mx.float32)
    assert not ran and (simulated_gpu / "verdicts.json").read_bytes() == remembered
    change_kernel(monkeypatch, "moce_route", header=WRONG_BASE)
    load_model(folder, mx.float32)
    assert ran == ["moce_route"] and "moce_route falls back" in caplog.text
