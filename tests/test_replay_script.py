"""scripts/replay_routing.py, and the option that writes what it reads."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path

import pytest

from mlx_moe.cli import main as mlx_moe
from mlx_moe.paging.trace import read_trace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import replay_routing


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    """Of a command: the demonstration model, ten experts of forty in memory."""
    file = tmp_path_factory.mktemp("script") / "t"
    arguments = ["--prompt", "def main():", "--max-tokens", "6", "--expert-slots", "10", "--verbose", "F"]
    assert mlx_moe(["generate", *arguments, "--record-routing", str(file)]) == 0
    return file


def test_every_rule_in_one_table(recording, tmp_path, capsys):
    out = tmp_path / "x.json"
    arguments = [str(recording), "--slots", "8", "10", "--learn", str(recording), "--bonus", "0.85", "3"]
    arguments += ["--max-rank", "24", "none", "--machine", "m2-16", "--dense-gb", "0.5", "--json", str(out)]
    assert replay_routing.main(arguments) == 0
    text, rows = capsys.readouterr().out, json.loads(out.read_text())
    names = ["lru", "frequency", "lfu-decay", "lru+hold", "global", "learned fill", "belady", "belady-global"]
    names += [f"moce {bonus} / 3 / {cap}" for cap in ("24", "none") for bonus in ("0.85", "3")]
    assert [row["rule"] for row in rows] == 2 * names and {row["slots"] for row in rows} == {8, 10}
    assert all(f"\n{name:<28}{8:>6}" in text for name in names) and "tok/pass" in text and "190 µs per wait" in text
    for row in rows:
        time = row["time"]
        total = sum(time[name] for name in time if name.endswith("_s") and name != "tokens_s")
        assert row["tokens"] / row["passes"] / total == pytest.approx(time["tokens_s"])
        assert time["dense_s"] == 0.5e9 / 100e9 and time["waits_s"] == pytest.approx(8 * 190e-6)
    assert any(row["substituted"] > 0 for row in rows)


def test_each_option_counts(recording, capsys):
    """Of each, a figure that it changes."""

    def printed(*arguments: str) -> str:
        assert replay_routing.main([str(recording), "--rule", "lru", "lfu-decay", "lru+hold", "moce", *arguments]) == 0
        return capsys.readouterr().out

    plain = printed()
    for arguments in (
        ["--no-read-ahead"], ["--keep-top", "0"], ["--slots", "7"], ["--bonus", "9"], ["--max-rank", "6"],
        ["--drafts", "1", "1"], ["--machine", "m5-pro-48", "--dense-gb", "1"],
    ):  # fmt: skip
        assert printed(*arguments) != plain, arguments
    priced = printed("--machine", "m1-max-64", "--dense-gb", "1")
    assert printed("--machine", "m1-max-64", "--dense-gb", "1", "--wait-us", "60") != priced
    assert printed("--drafts", "0.5", "--seed", "3") != printed("--drafts", "0.5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.bin"], "nowhere.bin"),
        ([__file__], "test_replay_script.py: not a recording of routing (it does not start like one)"),
        (["TRACE", "--slots", "3"], "slots are 3; allowed: at least 6"),
        (["TRACE", "--rule", "learned fill"], "learned fill needs --learn TRACE"),
        (["TRACE", "--machine", "m2-16"], "--machine needs --model M or --dense-gb X"),
        (["TRACE", "--max-rank", "x"], "--max-rank x; needed: a whole number or 'none'"),
        (["TRACE", "--max-rank", "2"], "moce max_rank is 2; allowed: at least 6"),
        (["TRACE", "--drafts", "2"], "acceptance is (2.0,)"),
    ],
)
def test_errors_are_one_line(recording, arguments, message, capsys):
    assert replay_routing.main([str(recording) if a == "TRACE" else a for a in arguments]) == 1
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["t", "--synthetic"], ["--predict", "--synthetic"]])
def test_one_source(arguments, capsys):
    with pytest.raises(SystemExit):
        replay_routing.main(arguments)
    assert "needed: one of TRACE, --synthetic and --predict" in capsys.readouterr().err


def test_a_plot_without_matplotlib(recording, tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def missing(name, *arguments, **keywords):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert replay_routing.main([str(recording), "--rule", "lru", "--plot", str(tmp_path / "x.png")]) == 1
    assert "--plot needs matplotlib: pip install 'mlx-moe-stream[plot]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_plot(recording, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "x.png"
    assert replay_routing.main([str(recording), "--rule", "lru", "belady", "moce", "--plot", str(file)]) == 0
    assert file.read_bytes()[:4] == b"\x89PNG" and [path.name for path in tmp_path.iterdir()] == ["x.png"]


def test_perplexity_records_the_exact_router(tmp_path, capsys):
    text, file = tmp_path / "a.txt", tmp_path / "t"
    text.write_text("import os\n" * 10)
    arguments = ["--text", str(text), "--one-token", "--tokens", "4", "--expert-slots", "10", "--moce"]
    assert mlx_moe(["perplexity", *arguments, "--record-routing", str(file)]) == 0
    trace = read_trace(file)
    assert len(trace.passes) == 4 and trace.header.moce is None and not trace.cut


@pytest.mark.parametrize("verb", [["generate"], ["perplexity", "--one-token", "--text", __file__]])
def test_a_folder_that_is_not_there(verb, capsys):
    assert mlx_moe([*verb, "--record-routing", "nowhere/t"]) != 0
    assert "--record-routing nowhere/t: its folder does not exist" in capsys.readouterr().err
