"""``mlx-moe perplexity``: the loss of decoding, on the same tokens for every setting, and what settings cost."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from checkpoints import random_weights, write
from mlx_moe import MoceConfig, load, quality
from mlx_moe.cli import main, perplexity
from mlx_moe.documents import read_documents
from mlx_moe.quality import Passage, Score, against, interval, passages, score
from paging.streamed import write_model
from tiny_tokenizer import save_tokenizer, short_config

TEXT = "the rest of it, in order\0then another one; and the end of that"
EOS = 123


@pytest.fixture(scope="module")
def streamed(tmp_path_factory) -> Path:
    """A GGUF file of 40 experts per layer, of which a token uses 4."""
    return write_model(tmp_path_factory.mktemp("streamed") / "m.gguf", tokenizer=True)


@pytest.fixture
def texts(tmp_path) -> list[str]:
    """Files of two documents and of one."""
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("print(a + b)")
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


@pytest.fixture
def run(streamed, texts, tmp_path, capsys):
    """(status, rows of the JSON, standard output, standard error) of one call."""

    def call(*argv: str, slots: int = 8):
        capsys.readouterr()
        path = tmp_path / "out.json"
        path.unlink(missing_ok=True)
        given = ["--model", str(streamed), "--text", *texts, "--dtype", "float32", "--expert-slots", str(slots)]
        try:
            status = main(["perplexity", *given, "--json", str(path), *argv])
        except SystemExit as stop:
            status = stop.code
        rows = json.loads(path.read_text())["rows"] if path.exists() else None
        return status, rows, *capsys.readouterr()

    return call


# Texts


def test_documents(tmp_path):
    plain, packed = tmp_path / "a.txt", tmp_path / "a.txt.xz"
    plain.write_text("one\0\0zwölf\0three")
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    assert read_documents(plain) == read_documents(packed) == ["one", "zwölf", "three"]
    assert (
        read_documents(plain, 6) == ["one", "zw"]
        and read_documents(plain, 7)[1] == "zwö"
        and read_documents(plain, 0) == []
    )
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.txt\.xz: not a whole \.xz file"):
        read_documents(packed)


def test_passages(tmp_path):
    """Shares of files, whole documents with their end, the last one cut; bytes of what is scored."""
    (tmp_path / "a").write_text("abc\0defgh")
    (tmp_path / "b").write_text("xyz!")
    files = [tmp_path / "a", tmp_path / "b"]

    def cut(count):
        return passages(files, lambda text: [ord(c) for c in text], lambda ids: "".join(map(chr, ids)), 0, count)

    a, b, c, d, x, y = (ord(c) for c in "abcdxy")
    assert cut(7) == [Passage((0, a, b, c), (a, b, c, 0), 3), Passage((0, x, y), (x, y, ord("z")), 3)]
    assert cut(9)[1] == Passage((0,), (d,), 1) and cut(10)[-1].size_bytes == 4
    with pytest.raises(ValueError, match=r"b is 1 tokens too short for its share of 12"):
        cut(12)
    with pytest.raises(ValueError, match="1 tokens of 2 files; needed: at least one of each"):
        cut(1)


# Figures


def test_losses_are_those_of_the_model(streamed):
    """Of every token, as the whole document in one pass has them, and as every later call."""
    model, tokenizer = load(streamed, dtype=mx.float32, expert_slots=8)
    ids = tokenizer.encode("the rest of it", add_special_tokens=False)
    inputs, targets, done = (EOS, *ids), (*ids, EOS), []
    with model:
        logits = model(mx.array([inputs]))[0]
        want = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, mx.array(targets)[:, None], axis=-1)[:, 0]
        found = score(model, [Passage(inputs, targets, 14)] * 2, done.append)
        assert np.abs(found.losses - np.tile(np.array(want), 2)).max() < 1e-4
        assert np.array_equal(found.losses[: len(ids) + 1], found.losses[len(ids) + 1 :])
    assert done == list(range(1, 2 * len(targets) + 1)) and found.size_bytes == 28
    figures, n = found.as_dict(), len(done)
    assert figures["tokens"] == n and math.isclose(figures["nats_per_token"], found.losses.mean())
    assert math.isclose(figures["perplexity"], math.exp(found.losses.mean()))
    assert math.isclose(figures["bits_per_byte"], found.losses.sum() / math.log(2) / 28)
    assert figures["hit_rate"] == found.experts.hits / (found.experts.hits + found.experts.misses)
    assert figures["bytes_per_token"] == found.experts.bytes_read / n and figures["agreement"] == 1


def test_the_interval():
    """Seeded, no width for equal differences, and as wide as theory says for independent ones and for runs."""
    rng = np.random.default_rng(5)
    noise = rng.standard_normal(4096)
    low, high = interval(noise + 3)
    assert (low, high) == interval(noise + 3) != interval(noise + 3, seed=1)
    assert low < noise.mean() + 3 < high and abs((high - low) / (2 * 1.96 / 64) - 1) < 0.15
    runs = np.repeat(rng.standard_normal(512), 8)
    low, high = interval(runs)
    assert (high - low) / (2 * 1.96 * runs.std() / 64) > 2, "neighbours that are alike widen it"
    for few in (1, 5, 40):
        assert np.allclose(interval(np.full(few, 0.25)), 0.25)


def test_scores_of_different_tokens_are_not_compared():
    one, other = (Score(np.ones(n), 10, None, 1.0) for n in (3, 4))
    with pytest.raises(ValueError, match="4 and 3 scored tokens cannot be compared"):
        against(one, other)
    assert against(one, one)["perplexity_ratio_95"] == [1, 1]


# The verb


def test_a_table(run):
    """Every pair, after the exact router, on the same tokens; each as if it had run alone."""
    table = ("--table", "bonus=0,9", "cap=6,none")
    status, rows, out, _ = run("--one-token", "--tokens", "12", *table)
    assert status == 0 and [row["moce"] for row in rows] == [
        None,
        {"bonus": 9, "keep_top": 3, "max_rank": 6},
        {"bonus": 9, "keep_top": 3, "max_rank": None},
    ]
    exact, capped, free = rows
    assert exact["tokens"] == capped["tokens"] == 12 and exact["agreement"] == 1 and exact["kl_per_token"] == 0
    assert free["hit_rate"] > exact["hit_rate"] and free["agreement"] < capped["agreement"] < 1
    assert free["kl_per_token"] > capped["kl_per_token"] > 0 and free["substituted_per_token"] > 0
    low, high = free["loss_difference_95"]
    assert low < free["loss_difference"] < high
    assert math.isclose(free["loss_difference"], free["nats_per_token"] - exact["nats_per_token"])
    assert math.isclose(free["hit_rate_gained"], free["hit_rate"] - exact["hit_rate"])
    assert math.isclose(free["misses_saved"], 1 - free["misses_per_token"] / exact["misses_per_token"])
    lines = out.splitlines()
    assert len(lines) == 4 and lines[1].split()[0] == "exact" and lines[3].split()[:3] == ["9", "3", "none"]
    alone = run("--one-token", "--tokens", "12", "--moce", "--moce-bonus", "9", "--moce-max-rank", "none")[1]
    assert [{**row, "tokens_per_s": 0} for row in alone] == [{**row, "tokens_per_s": 0} for row in (exact, free)]


def test_settings(run):
    """Without --moce the exact router only; tokens, keep_top beside a table, and the seed count."""
    few = run("--one-token", "--tokens", "6")[1]
    assert len(few) == 1 and few[0]["tokens"] == 6 and few[0]["moce"] is None and few[0]["slots"] == 8
    argv = ("--one-token", "--tokens", "12", "--moce", "--moce-keep-top", "0", "--table", "bonus=9")
    rows, other = run(*argv)[1], run(*argv, "--seed", "3")[1]
    assert rows[1]["moce"] == {"bonus": 9, "keep_top": 0, "max_rank": 24}
    assert rows[1]["loss_difference"] == other[1]["loss_difference"]
    assert rows[1]["loss_difference_95"] != other[1]["loss_difference_95"]


def test_a_table_at_once(run):
    """The same table from one batch as from a run per setting without read-ahead, and it says what it is."""
    argv = ("--one-token", "--tokens", "8", "--table", "bonus=9", "cap=6,none")
    status, rows, out, _ = run(*argv, "--at-once")
    assert status == 0 and out.splitlines()[-1] == "all at once: read-ahead off, LRU, memory simulated"
    one_by_one, printed = run(*argv, "--no-read-ahead")[1:3]
    assert out.splitlines()[:-1] == printed.splitlines() and len(rows) == 3
    for row, want in zip(rows, one_by_one, strict=True):
        assert row.keys() == want.keys() and row["moce"] == want["moce"]
        for name in ("hit_rate", "misses_per_token", "bytes_per_token", "agreement", "substituted_per_token", "slots"):
            assert row[name] == want[name], name
        assert math.isclose(row["kl_per_token"], want["kl_per_token"], rel_tol=1e-4, abs_tol=1e-6)
        assert math.isclose(row["nats_per_token"], want["nats_per_token"], rel_tol=1e-5)


def test_at_once_writes_what_it_has(run, tmp_path, monkeypatch):
    """Now and then, so that a long run that ends early leaves its figures."""
    monkeypatch.setattr(quality, "INTERIM_EVERY", 4)
    sizes, real = [], perplexity._write

    def write_json(args, rows, **changes):
        real(args, rows, **changes)
        written = json.loads((tmp_path / "out.json").read_text())
        assert written["at_once"] is True and written["read_ahead"] is False and written["tokens_asked"] == 10
        sizes.append([row["tokens"] for row in written["rows"]])  # exact, and one setting

    monkeypatch.setattr(perplexity, "_write", write_json)
    assert run("--one-token", "--at-once", "--tokens", "10", "--moce")[0] == 0
    assert sizes == [[4, 4], [8, 8], [10, 10]]


def test_with_all_experts_in_memory(run):
    status, rows, out, _ = run("--one-token", "--tokens", "4", "--moce", slots=40)
    assert status == 0 and rows[0]["hit_rate"] is None and rows[1]["loss_difference"] == 0 and "%" not in out[80:]


def test_model_folders(tmp_path, texts, capsys):
    """They are scored too; there is nothing to prefer in them."""
    raw = short_config()
    folder = save_tokenizer(write(tmp_path / "m", raw, random_weights(raw)))
    call = ["perplexity", "--model", str(folder), "--text", *texts, "--one-token", "--tokens", "4"]
    assert main(call) == 0 and "exact" in capsys.readouterr().out
    assert main([*call, "--moce", "--expert-slots", "4"]) == 0 and "0.85" in capsys.readouterr().out
    assert main([*call, "--moce"]) == 1
    assert "whose experts are all in memory" in capsys.readouterr().err
    assert main([*call, "--at-once", "--expert-slots", "8"]) == 1
    assert "8 simulated slots per layer; allowed: 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*call, "--at-once"])
    assert "--at-once needs --expert-slots N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message", "status"),
    [
        (("--tokens", "4"), "--one-token", 2),
        (("--one-token", "--tokens", "900"), "too short for its share of 900", 1),
        (("--one-token", "--table", "top=3"), "--table top=3: needed: bonus=0.2,0.85 or cap=none,8,16", 1),
        (("--one-token", "--table", "bonus="), "--table bonus=: needed", 1),
        (("--one-token", "--table", "cap=8,few"), "--table cap=8,few: 'few' is not a number", 1),
        (("--one-token", "--table", "cap=3"), "moce max_rank is 3; allowed: at least 4", 1),
        (
            ("--one-token", "--at-once", "--tokens", "4", "--expert-slots", "40"),
            "40 simulated slots per layer; allowed: 4, as a",
            1,
        ),
        (("--one-token", "--at-once", "--table", "cap=3"), "moce max_rank is 3; allowed: at least 4", 1),
        (("--one-token", "--at-once", "--memory", "1MB"), "this machine has", 1),
        (("--one-token", "--moce-bonus", "1"), "--moce-bonus needs --moce", 1),
        (("--one-token", "--moce", "--moce-bonus", "1", "--table", "bonus=2"), "--moce-bonus and --table bonus=…", 1),
        (("--one-token", "--json", "/no/such/x.json"), "its folder does not exist", 1),
        (("--one-token", "--text", "/no/such.txt"), "/no/such.txt: no such file", 1),
        (("--one-token", "--prefill-step-size", "8"), "unrecognized arguments", 2),
    ],
)
def test_what_cannot_be(run, argv, message, status):
    found, _, _, err = run(*argv)
    assert found == status and message in err and err.count("\n") == 1, err


def test_a_setting_is_checked_before_the_text_runs(run):
    """A bonus below 0 names itself, whatever stands before it in the table."""
    status, rows, _, err = run("--one-token", "--table", "bonus=0.2,-1")
    assert (status, rows) == (1, None) and "moce bonus is -1.0" in err and MoceConfig().bonus == 0.85
