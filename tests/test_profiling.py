"""Where a token's time goes, as ``--profile`` says."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import mlx.core as mx
import pytest

from disks import read_with
from mlx_moe import load, stream_generate
from mlx_moe.cli import main
from paging.streamed import LAYERS, write_model


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("profile") / "m.gguf", tokenizer=True)


def slow_reads(monkeypatch, seconds: float) -> None:
    real = os.preadv
    read_with(monkeypatch, lambda *a: (time.sleep(seconds), real(*a))[1])


def test_parts_add_up_and_the_disk_shows(path, monkeypatch):
    model, tokenizer = load(path, dtype=mx.float32, expert_slots=4, io_threads=1, read_ahead=False)
    with model:
        *parts, quick = stream_generate(model, tokenizer, "the test", max_tokens=6)
        assert all(part.profile is None for part in parts) and quick.profile.tokens == 5
        (only,) = stream_generate(model, tokenizer, "the test", max_tokens=1)
        slow_reads(monkeypatch, 0.01)
        *_, slow = stream_generate(model, tokenizer, "the test", max_tokens=4)
    for profile in (quick.profile, slow.profile):
        parts = profile.host_ms, profile.device_ms, profile.disk_ms
        assert min(parts) > 0 and sum(parts) == pytest.approx(profile.token_ms)
    assert slow.profile.disk_ms > 10 * LAYERS > quick.profile.disk_ms, "each layer waits for one read at least"
    assert slow.profile.disk_ms > 0.5 * slow.profile.token_ms and only.profile is None


def test_a_model_in_memory_waits_for_no_disk(path):
    model, tokenizer = load(path, dtype=mx.float32, resident=True)
    with model:
        *_, last = stream_generate(model, tokenizer, "the test", max_tokens=4)
    assert last.profile.device_ms > 0 and last.profile.disk_ms < last.profile.token_ms


@pytest.mark.parametrize("profile", [True, False])
def test_the_flag(path, capsys, tmp_path, profile):
    arguments = ["--prompt", "the test", "--max-tokens", "4", "--dtype", "float32", "--expert-slots", "8"]
    stats = tmp_path / "s.json"
    flags = ["--profile"] if profile else []
    assert main(["generate", "--model", str(path), *arguments, *flags, "--stats-json", str(stats)]) == 0
    line = re.search(r"^Token: .* ms = host .* \+ device .* \+ disk .*, mean of 3$", capsys.readouterr().out, re.M)
    found = json.loads(stats.read_text()).get("profile")
    assert (line is not None) == (found is not None) == profile
    assert not profile or found.keys() == {"tokens", "token_ms", "host_ms", "device_ms", "disk_ms"}
