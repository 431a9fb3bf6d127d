"""``mlx-moe doctor``: what it prints, writes and returns, without a GPU and on a simulated one."""

from __future__ import annotations

import json
import re
import sys

import mlx.core as mx
import pytest

import mlx_moe
from custom_kernels import checks, dispatch
from mlx_moe import verdicts
from mlx_moe.cli import doctor, main, options
from mlx_moe.paging import native_reads
from simulated import WRONG_BASE, change_kernel

FEW = [("gdn_step", ""), ("gdn_commit", ""), ("moce_route", ""), ("block_gemv", "Q8_0"), ("expert_down", "Q8_0")]


@pytest.fixture
def few(monkeypatch):
    """Not all kernels, for the simulator takes a second for each; and their times are not measured."""

    def once(call, calls):
        assert calls > 1
        mx.eval(call())
        return 12.34

    monkeypatch.setattr(checks, "every_kernel", lambda: iter(FEW))
    monkeypatch.setattr(checks, "_microseconds", once)


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    """A machine without a GPU."""
    monkeypatch.setattr(dispatch, "device_choice", lambda: dispatch.Choice("reference", "MLX runs on the CPU"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_a_gpu(no_gpu, capsys):
    """Every op has its line, nothing is written, and that is no failure."""
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and not no_gpu.exists()
    for op, variant in checks.every_kernel():
        assert re.search(rf"\b{variant.split('+')[0] or op}\b", out), f"{op} {variant}"
    words = " ".join(out.split())
    assert "Every op runs on its reference: MLX runs on the CPU. No kernel was checked" in words
    for word in (f"mlx-moe {mlx_moe.__version__}", f"mlx {mx.__version__}", "mlx-lm ", "Python 3.", "GiB"):
        assert word in words, word
    assert re.search(r"^one wait +\d+\.\d µs", out, re.MULTILINE)
    assert re.search(r"^reads +by the package's own threads$", out, re.MULTILINE) or native_reads.library() is None
    assert not re.search(r"FAILED|metal|cuda", out)


def test_reads_by_pythons_threads_are_said(no_gpu, monkeypatch, capsys):
    monkeypatch.setattr(native_reads, "library", lambda: None)
    assert main(["doctor"]) == 0
    assert re.search(r"^reads +by Python's threads, slower: .*; install the", capsys.readouterr().out, re.MULTILINE)


def test_columns_line_up_within_80(no_gpu, capsys):
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[5:])) <= doctor.WIDTH
    starts = [i for i, line in enumerate(lines) if line.startswith("format")]
    assert len(starts) == 2, "dense ops and experts"
    for start in starts:
        table = lines[start : lines.index("", start)]
        assert len(table) == 2 + 19
        assert len({len(line) for line in table}) == 1, "every line ends in the same column"


def test_good_kernels(simulated_gpu, few, capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "None of 5 kernels failed. All run on metal: a simulated GPU." in out
    assert re.search(r"^gdn_step +\d\.\de-0[6-8] +12\.3$", out, re.MULTILINE)
    assert len(re.findall(r"^Q8_0 +\d\.\de-0[6-8] +12\.3$", out, re.MULTILINE)) == 2, "dense, then experts"
    assert len(verdicts.read_verdicts()) == 5 and all(verdict.ok for verdict in verdicts.read_verdicts().values())


def test_a_broken_kernel_is_named_with_the_remedy(simulated_gpu, few, monkeypatch, capsys):
    change_kernel(monkeypatch, "gdn_step", header=WRONG_BASE)
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    words = " ".join(out.split())
    assert re.search(r"^gdn_step +FAILED +-$", out, re.MULTILINE) and out.count("FAILED") == 1
    assert "gdn_step runs on reference: its kernel failed the check on this machine: window of 1, float32: out" in words
    assert "gdn_commit runs on reference: it goes with gdn_step" in words
    assert "1 of 5 kernels failed. All others run on metal: a simulated GPU." in words
    assert doctor.REMEDY in words and err == ""
    assert max(map(len, out.splitlines()[5:])) <= doctor.WIDTH
    assert [verdict.ok for verdict in verdicts.read_verdicts().values()].count(False) == 1


def test_a_mended_kernel_is_used_again(simulated_gpu, few, monkeypatch, capsys):
    """Verdicts are found anew, whatever is remembered."""
    perfect = verdicts.run_check
    monkeypatch.setattr(verdicts, "run_check", lambda *args: checks.Verdict(False, message="no chance"))
    assert main(["doctor"]) == 1 and "5 of 5 kernels failed" in capsys.readouterr().out
    monkeypatch.setattr(verdicts, "run_check", perfect)
    assert main(["doctor"]) == 0
    assert all(verdict.ok for verdict in verdicts.read_verdicts().values())


def test_json(no_gpu, few, monkeypatch, capsys, tmp_path):
    """To a file beside the text, or alone to standard output."""
    monkeypatch.setattr(checks, "_microseconds", lambda call, calls: 12.34)
    path = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(path)]) == 0
    assert "Every op runs" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert main(["doctor", "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert report.pop("wait_us") > 0 and printed.pop("wait_us") > 0 and report == printed
    assert (report["mlx"], report["backend"]) == (mx.__version__, "reference")
    assert report["device"]["memory_bytes"] > 1 << 28
    assert [(kernel["op"], kernel["variant"]) for kernel in report["kernels"]] == FEW
    assert report["kernels"][0]["verdict"] == {"ok": True, "error": None, "microseconds": 12.34, "message": ""}


def test_json_of_a_failure(simulated_gpu, few, monkeypatch, capsys):
    change_kernel(monkeypatch, "moce_route", header=WRONG_BASE)
    assert main(["doctor", "--json", "-"]) == 1
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert [kernel["op"] for kernel in kernels if not kernel["verdict"]["ok"]] == ["moce_route"]
    assert [kernel["backend"] for kernel in kernels] == ["metal", "metal", "reference", "metal", "metal"]


def test_progress_is_shown_on_a_terminal_only(no_gpu, few, monkeypatch, capsys):
    monkeypatch.setattr(checks, "_microseconds", lambda call, calls: 12.34)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["doctor"]) == 0
    err = capsys.readouterr().err
    assert "checking moce_route" in err and "checking block_gemv Q8_0" in err and err.endswith("\r\x1b[K")


@pytest.mark.parametrize("argv", [["--nonsense"], ["--js", "x"], ["--json"], ["--model", "x"], ["stray"]], ids=" ".join)
def test_errors_of_use_are_one_line(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *argv])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and err.startswith("mlx-moe doctor: error: ")


def test_a_file_that_cannot_be_written_is_refused_at_once(no_gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(checks, "every_kernel", lambda: pytest.fail("checked before"))
    assert main(["doctor", "--json", str(tmp_path / "no" / "x.json")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--json" in err


COVERED = {"--json": test_json}


def test_every_flag_has_its_test(monkeypatch, capsys):
    parsers = []
    original = options.plain_parser
    monkeypatch.setattr(options, "plain_parser", lambda *args: parsers.append(original(*args)) or parsers[-1])
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "--json" in capsys.readouterr().out
    for action in parsers[0]._actions[1:]:  # the first is --help
        assert COVERED.keys() & set(action.option_strings), f"{action.option_strings}: no test shows what it changes"


@pytest.mark.full
def test_every_kernel_on_the_simulator(simulated_gpu, monkeypatch, capsys):
    monkeypatch.setattr(checks, "_microseconds", lambda call, calls: 12.34)
    assert main(["doctor"]) == 0
    assert f"None of {len(list(checks.every_kernel()))} kernels failed" in capsys.readouterr().out
