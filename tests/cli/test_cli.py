"""The command: every flag changes something, every refusal is one line, and what is printed where."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_moe
from checkpoints import random_weights, write
from mlx_moe import MoceConfig, load, runtime, streaming
from mlx_moe.cli import VERBS, main, options, session
from mlx_moe.cli.chat import HELP, Conversation
from mlx_moe.paging.trace import read_trace
from mlx_moe.routing_settings import moce_settings
from mlx_moe.sampling import ANSWERING, THINKING, Sampling, chat_sampling
from paging.streamed import ceiling, write_model
from tiny_tokenizer import END_THINK, TEMPLATE, THINK, save_tokenizer, short_config

OWN_TESTS = ("doctor", "download", "convert", "imatrix", "info", "perplexity", "plan", "profile", "usage")
MODEL_VERBS = [verb for verb in VERBS if verb not in OWN_TESTS]
REFUSED = [flag for flag, *_ in options._REFUSED]
TEXT = "then the rest of it"
COUNT = "7"
PLAIN: list[Any] = []
"""The result of generating after TEXT without any option, once it is known."""


@dataclass
class Result:
    """What one call of the command did."""

    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """The generated text between mlx-lm's lines."""
        match = re.fullmatch(r"==========\n(.*)\n==========\nPrompt: .*", self.out, re.DOTALL)
        assert match, self.out + self.err
        return match[1]

    @property
    def prompt_tokens(self) -> int:
        return int(re.search(r"^Prompt: (\d+) tokens", self.out, re.MULTILINE)[1])

    @property
    def generated(self) -> int:
        return int(re.search(r"^Generation: (\d+) tokens", self.out, re.MULTILINE)[1])


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A model whose tokenizer has a chat template and thinking tokens."""
    raw = short_config()
    return save_tokenizer(write(tmp_path_factory.mktemp("chat"), raw, random_weights(raw, seed=7)), TEMPLATE)


@pytest.fixture(scope="session")
def bare(tmp_path_factory) -> Path:
    """The same model without a template."""
    raw = short_config()
    return save_tokenizer(write(tmp_path_factory.mktemp("bare"), raw, random_weights(raw, seed=7)))


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command in this process."""

    def call(*argv: Any, stdin: str | None = None) -> Result:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            status = main([str(item) for item in argv])
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return Result(status, out, err)

    return call


@pytest.fixture
def write_text(run, bare):
    """Generate from the model without a template."""

    def call(*argv: Any, prompt: str = TEXT, **kwargs: Any) -> Result:
        if not argv and prompt == TEXT and not kwargs and PLAIN:
            return PLAIN[0]
        result = run("generate", "--model", bare, "-m", COUNT, "-p", prompt, *argv, **kwargs)
        assert result.status == 0, result.err
        if not argv and prompt == TEXT:
            PLAIN.append(result)
        return result

    return call


def assert_refused(result: Result, *words: str, status: int = 1) -> None:
    assert result.status == status, f"{result.status}: {result.out}{result.err}"
    assert result.err.count("\n") == 1 and result.err.endswith("\n"), f"not one line: {result.err!r}"
    assert re.match(r"mlx-moe( [a-z-]+)?: error: ", result.err), result.err
    for word in words:
        assert word in result.err, result.err


# The command itself


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(run, flag):
    result = run(flag)
    assert result.status == 0 and result.err == ""
    assert all(verb in result.out for verb in VERBS)


def test_no_verb(run):
    result = run()
    assert result.status == 2 and result.out == ""
    assert "usage" in result.err


@pytest.mark.parametrize("verb", ["write", "", "-x", "--model", "Generate"])
def test_unknown_verbs(run, verb):
    assert_refused(run(verb), repr(verb), *VERBS, status=2)


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(run, flag):
    result = run(flag)
    assert (result.status, result.out) == (0, f"mlx-moe {mlx_moe.__version__}\n")


@pytest.mark.parametrize("verb", MODEL_VERBS)
def test_help_of_a_verb(run, verb):
    result = run(verb, "--help")
    assert result.status == 0 and "--model" in result.out
    assert not any(re.search(rf"{flag}\b", result.out) for flag in REFUSED), "refused flags are not offered"


@pytest.mark.parametrize("verb", MODEL_VERBS)
@pytest.mark.parametrize("flag", REFUSED)
def test_refused_flags(run, verb, flag):
    for values in ([], ["8"], ["a", "b"]):
        result = run(verb, flag, *values)
        assert_refused(result, f" {flag} cannot be used with this model: ", status=2)
        reason = result.err.split("this model: ")[1]
        assert len(reason.split()) >= 3, f"no reason: {result.err}"


@pytest.mark.parametrize("verb", MODEL_VERBS)
@pytest.mark.parametrize(
    "argv",
    [["--nonsense"], ["--mod", "x"], ["--dtype", "int8"], ["--prefill-step-size", "many"], ["--model"], ["stray"]],
    ids=" ".join,
)
def test_errors_of_use_are_one_line(run, verb, argv):
    needed = ["--prompt", "x", "--prompt-cache-file", "y"] if verb == "cache-prompt" else []
    assert_refused(run(verb, *needed, *argv), f"mlx-moe {verb}", status=2)


@pytest.mark.parametrize(
    "argv",
    [
        ["--verbose", "maybe"],
        ["--max-tokens", "few"],
        ["--temp", "hot"],
        ["--top-k", "1.5"],
        ["--seed", "x"],
        ["--chat-template-config", "{"],
        ["--chat-template-config", "[]"],
        ["--chat-template-config", "5"],
    ],
    ids=" ".join,
)
def test_values_of_the_wrong_kind(run, argv):
    assert_refused(run("generate", *argv), argv[0], status=2)


@pytest.mark.parametrize("argv", [["--prompt", "x"], ["--prompt-cache-file", "x"], []], ids=" ".join)
def test_cache_prompt_needs_both(run, argv):
    assert_refused(run("cache-prompt", *argv), "required", status=2)


@pytest.mark.parametrize(
    "argv",
    [
        ["-m", "0"],
        ["-m", "-2"],
        ["--prefill-step-size", "0"],
        ["--min-p", "2", "--temp", "1"],
        ["--min-tokens-to-keep", "0", "--temp", "1", "--min-p", "0.1"],
        ["--xtc-probability", "2", "--temp", "1"],
        ["--xtc-probability", "1", "--xtc-threshold", "0.9", "--temp", "1"],
        ["--top-k", "1000", "--temp", "1"],
        ["--seed", "-1"],
        ["--seed", str(2**64)],
        ["--extra-eos-token", "no such token"],
        ["--prompt", ""],
    ],
    ids=" ".join,
)
def test_values_out_of_range_are_one_line(run, bare, argv):
    result = run("generate", "--model", bare, *argv)
    mx.random.seed(0)  # an error inside mlx-lm's compiled samplers leaves the random state unusable
    assert result.status in (1, 2), result
    assert result.err.count("\n") == 1 and "error: " in result.err, result.err


@pytest.mark.parametrize("verb", MODEL_VERBS)
def test_model_problems_are_one_line(run, verb, tmp_path, folder):
    needed = ["--prompt", "x", "--prompt-cache-file", tmp_path / "y"] if verb == "cache-prompt" else []
    assert_refused(run(verb, "--model", tmp_path / "nothing", *needed, stdin=""), "nothing")
    (tmp_path / "empty").mkdir()
    assert_refused(run(verb, "--model", tmp_path / "empty", *needed, stdin=""), "config.json")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    assert_refused(run(verb, "--model", tmp_path / "empty", *needed, stdin=""), "llama")
    (tmp_path / "empty" / "config.json").write_text((folder / "config.json").read_text())
    assert_refused(run(verb, "--model", tmp_path / "empty", *needed, stdin=""), "safetensors")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "5"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}'),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": 5}}'),
        ("tokenizer.json", "{"),
        ("tokenizer.json", ""),
        ("generation_config.json", "{"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", '{"eos_token_id": [["x"]]}'),
        ("generation_config.json", '{"eos_token_id": {"a": 1}}'),
        ("generation_config.json", "[" * 100_000),
    ],
    ids=lambda value: value[:30],
)
def test_damaged_tokenizer_files_are_one_line(run, tmp_path, bare, name, content):
    for path in bare.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_text(content)
    assert_refused(run("generate", "--model", tmp_path, "-m", "1"), str(tmp_path))


# Flags of the model


def test_model_and_its_default(run, bare, monkeypatch):
    want = run("generate", "--model", bare, "-m", COUNT).text
    monkeypatch.setattr(runtime, "DEMO", bare)
    assert run("generate", "-m", COUNT).text == want
    assert_refused(run("generate", "--model", bare / "config.json"), "is a file")


@pytest.mark.parametrize("verb", MODEL_VERBS)
def test_dtype(run, bare, folder, monkeypatch, tmp_path, verb):
    found = []
    original = session.open_model
    monkeypatch.setattr(session, "open_model", lambda args: found.append(original(args)) or found[-1])
    where = folder if verb == "chat" else bare
    needed = {
        "generate": ["-m", "1"],
        "chat": [],
        "cache-prompt": ["-p", "x", "--prompt-cache-file", tmp_path / "c.safetensors"],
    }[verb]
    for name in options.DTYPES:
        assert run(verb, "--model", where, "--dtype", name, *needed, stdin="q\n").status == 0
        assert found[-1][0](mx.array([[1]])).dtype == getattr(mx, name)


@pytest.mark.parametrize("verb", MODEL_VERBS)
def test_mtp(run, monkeypatch, tmp_path, verb):
    """The draft layer is the folder's own, or left out; tests/test_load_gguf.py has those of GGUF files."""
    raw = short_config()
    folder = save_tokenizer(write(tmp_path / "m", raw, random_weights(raw, mtp=True)), TEMPLATE)
    found, original = [], session.open_model
    monkeypatch.setattr(session, "open_model", lambda args: found.append(original(args)) or found[-1])
    needed = {
        "generate": ["-m", "1"],
        "chat": [],
        "cache-prompt": ["-p", "x", "--prompt-cache-file", tmp_path / "c.safetensors"],
    }[verb]
    for options_, has in (([], True), (["--mtp", "auto"], True), (["--mtp", "none"], False)):
        assert run(verb, "--model", folder, *options_, *needed, stdin="q\n").status == 0
        assert found[-1][0].has_mtp == has, options_
    assert_refused(run(verb, "--model", folder, "--mtp", "x.gguf", *needed), "mtp is x.gguf", "the folder's own")


@pytest.fixture
def passes(monkeypatch) -> list[tuple[int, int]]:
    """(done, total) of every progress call."""
    calls: list[tuple[int, int]] = []

    class Recorder(session.Progress):
        def __call__(self, done: int, total: int) -> None:
            calls.append((done, total))
            super().__call__(done, total)

    monkeypatch.setattr(session, "Progress", Recorder)
    return calls


@pytest.mark.parametrize("verb", MODEL_VERBS)
def test_prefill_step_size(run, folder, tmp_path, passes, verb):
    needed = {
        "generate": ["-p", TEXT, "-m", "1"],
        "chat": ["-m", "1"],
        "cache-prompt": ["-p", TEXT, "--prompt-cache-file", tmp_path / "c.safetensors"],
    }[verb]
    counts = []
    for size in (4, 2048):
        passes.clear()
        assert run(verb, "--model", folder, *needed, "--prefill-step-size", size, stdin=f"{TEXT}\nq\n").status == 0
        total = passes[0][1]
        assert passes[-1] == (total, total)
        counts.append(len(passes))
    assert counts[0] == 1 + -(-(total - 1) // 4) + 1
    assert counts[1] == 3


def test_progress_is_silent_without_a_terminal(write_text, run, folder):
    assert write_text("--prefill-step-size", "2").err == ""


def test_progress_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = session.Progress(4)
    for done in (0, 4, 8, 9):
        bar(done, 9)
    short = session.Progress(4)
    short(0, 4)
    assert "Prompt" in capsys.readouterr().err
    short(4, 4)
    assert capsys.readouterr().err == "", "no bar for a prompt of one pass"


# generate


def test_generate_prints_mlx_lms_lines(write_text, bare):
    result = write_text()
    model, tokenizer = load(bare)
    want = mlx_moe.generate(model, tokenizer, TEXT, max_tokens=int(COUNT))
    assert result.text == want
    assert result.err == ""
    assert result.generated == int(COUNT)
    assert re.search(r"\nPeak memory: \d+\.\d{3} GB\n$", result.out)


def test_prompt(write_text, run, bare):
    assert write_text(prompt="in the").prompt_tokens != write_text().prompt_tokens
    default = run("generate", "--model", bare, "-m", COUNT)
    assert default.text == write_text(prompt="hello").text
    assert run("generate", "--model", bare, "-m", COUNT, "--prompt", "hello").text == default.text


def test_prompt_from_standard_input(write_text, bare):
    text = "then\nthe \\n rest"  # a line feed, and a backslash with an n, which stays
    assert write_text(prompt="-", stdin=text).prompt_tokens == len(load(bare)[1].encode(text))
    assert write_text(prompt="-", stdin=TEXT).text == write_text().text


@pytest.mark.parametrize("escape", ["\\n", "\\t"])
def test_escapes_in_the_prompt(write_text, escape):
    real = {"\\n": "\n", "\\t": "\t"}[escape]
    got, want = write_text(prompt=f"then{escape}the"), write_text(prompt=f"then{real}the")
    assert (got.text, got.prompt_tokens) == (want.text, want.prompt_tokens)


def test_max_tokens(run, bare, folder):
    for flag in ("-m", "--max-tokens"):
        assert run("generate", "--model", bare, flag, 3).generated == 3


def test_max_tokens_in_chat(run, folder):
    short, long = (run("chat", "--model", folder, "-m", m, "--temp", 0, stdin=f"{TEXT}\nq\n").out for m in (2, 9))
    assert len(short) < len(long) and long.startswith(short[: short.rindex("\n>>")])


@pytest.mark.parametrize("value", ["F", "false", "f"])
def test_verbose_off_prints_the_text_alone(write_text, value):
    want = write_text().text
    result = write_text("--verbose", value)
    assert (result.out, result.err) == (want + "\n", "")
    assert write_text("--verbose", "T").text == want


def test_extra_eos_token(write_text, bare):
    model, tokenizer = load(bare)
    ids = [part.token for part in mlx_moe.stream_generate(model, tokenizer, TEXT, max_tokens=int(COUNT))]
    stop = ids[3]
    at = ids.index(stop)
    for name in (str(stop), tokenizer.convert_ids_to_tokens(stop)):
        result = write_text("--extra-eos-token", name)
        assert result.text == tokenizer.decode(ids[:at])
        assert result.generated == at + 1
    assert write_text("--extra-eos-token", str(ids[6]), str(stop)).generated == at + 1, "several tokens"


def test_stats_json(write_text, tmp_path):
    path = tmp_path / "stats.json"
    result = write_text("--stats-json", path)
    stats = json.loads(path.read_text())
    assert set(stats) == {
        "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "peak_memory", "finish_reason",
    }  # fmt: skip
    assert stats["prompt_tokens"] == result.prompt_tokens
    assert stats["generation_tokens"] == int(COUNT)
    assert stats["finish_reason"] == "length"
    assert stats["prompt_tps"] > 0 and stats["generation_tps"] > 0 and stats["peak_memory"] > 0


def test_profile(write_text, tmp_path):
    """The line, and the same numbers in the statistics; tests/test_profiling.py shows that they are right."""
    path = tmp_path / "stats.json"
    assert "ms = host" in write_text("--profile", "--stats-json", path).out
    assert json.loads(path.read_text())["profile"]["tokens"] == int(COUNT) - 1
    assert "ms = host" not in write_text().out


def test_stats_json_where_nothing_can_be_written(run, bare, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    assert_refused(run("generate", "--model", bare, "--stats-json", tmp_path / "no" / "x.json"), "--stats-json", "no")
    assert_refused(run("generate", "--model", bare, "--stats-json", tmp_path / "file" / "x.json"), "--stats-json")
    result = run("generate", "--model", bare, "-m", 1, "--stats-json", tmp_path / "folder")
    assert_refused(result, "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"], "a temporary file stayed"


# Sampling


def test_temp_and_seed(write_text):
    greedy = write_text().text
    warm = write_text("--temp", "1", "--seed", "7").text
    assert warm == write_text("--temp", "1", "--seed", "7").text, "a seed makes it reproducible"
    assert warm != greedy
    assert warm != write_text("--temp", "1", "--seed", "8").text
    assert write_text("--temp", "0", "--seed", "7").text == greedy


HOT = ("--temp", "2", "--seed", "7")


@pytest.mark.parametrize("flag", [("--top-k", "1"), ("--top-p", "0.000001"), ("--min-p", "1")])
def test_top_k_top_p_and_min_p(write_text, flag):
    assert write_text(*HOT, *flag).text == write_text().text != write_text(*HOT).text


def test_min_tokens_to_keep(write_text):
    kept = write_text(*HOT, "--min-p", "1", "--min-tokens-to-keep", "100").text
    assert kept != write_text(*HOT, "--min-p", "1").text


def test_xtc(write_text):
    on = (*HOT, "--xtc-probability", "1")
    plain, narrow = write_text(*HOT).text, write_text(*on, "--xtc-threshold", "0.001").text
    assert narrow != plain, "--xtc-probability"
    assert narrow != write_text(*on, "--xtc-threshold", "0.4").text, "--xtc-threshold"


@pytest.fixture
def sampler_settings(monkeypatch) -> list[dict[str, Any]]:
    """The settings of every sampler that a verb makes."""
    found: list[dict[str, Any]] = []

    def record(args: argparse.Namespace, tokenizer: Any) -> Any:
        found.append(vars(args))
        return make_sampler(0.0)

    monkeypatch.setattr(session, "sampler", record)
    return found


SAMPLING = {
    "--temp": 0.3, "--top-p": 0.5, "--top-k": 3, "--min-p": 0.2, "--min-tokens-to-keep": 2,
    "--xtc-probability": 0.5, "--xtc-threshold": 0.2, "--seed": 5,
}  # fmt: skip


@pytest.mark.parametrize("flag", SAMPLING)
def test_sampling_flags_reach_the_sampler(run, folder, sampler_settings, flag):
    for verb in ("generate", "chat"):
        assert run(verb, "--model", folder, "-m", 1, flag, SAMPLING[flag], stdin="q\n").status == 0
        assert sampler_settings[-1][flag[2:].replace("-", "_")] == SAMPLING[flag]


def test_the_sampler_is_made_of_all_settings(bare, monkeypatch):
    seen: dict[str, Any] = {}
    monkeypatch.setattr(session, "make_sampler", lambda *a, **k: seen.update(a=a, **k))
    names = {flag[2:].replace("-", "_"): value for flag, value in SAMPLING.items()}
    _, tokenizer = load(bare)
    session.sampler(argparse.Namespace(**names), tokenizer)
    assert seen["a"] == (0.3, 0.5, 0.2, 2)
    assert (seen["top_k"], seen["xtc_probability"], seen["xtc_threshold"]) == (3, 0.5, 0.2)
    assert set(seen["xtc_special_tokens"]) == {0, *tokenizer.eos_token_ids}, "line feed and stop tokens"


# Templates


def templated(folder: Path, *messages: tuple[str, str], **kwargs: Any) -> int:
    """How many tokens a conversation has."""
    tokenizer = load(folder)[1]
    kwargs.setdefault("add_generation_prompt", True)
    return len(tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in messages], **kwargs))


def test_the_template_is_used(run, folder, bare):
    result = run("generate", "--model", folder, "-p", TEXT, "-m", 1)
    assert result.prompt_tokens == templated(folder, ("user", TEXT))
    assert result.prompt_tokens > run("generate", "--model", bare, "-p", TEXT, "-m", 1).prompt_tokens


def test_ignore_chat_template(run, folder, bare):
    result = run("generate", "--model", folder, "-p", TEXT, "-m", COUNT, "--ignore-chat-template")
    assert result.text == run("generate", "--model", bare, "-p", TEXT, "-m", COUNT).text


def test_system_prompt(run, folder):
    call = ("generate", "--model", folder, "-p", TEXT, "-m", COUNT)
    result = run(*call, "--system-prompt", "be terse")
    assert result.prompt_tokens == templated(folder, ("system", "be terse"), ("user", TEXT))
    assert result.text != run(*call).text
    empty = run(*call, "--system-prompt", "")
    assert empty.prompt_tokens == templated(folder, ("system", ""), ("user", TEXT))


def test_system_prompt_in_chat(run, folder, passes):
    run("chat", "--model", folder, "-m", 1, "--system-prompt", "be terse", "--temp", 0, stdin=f"{TEXT}\nq\n")
    assert passes[0][1] == templated(folder, ("system", "be terse"), ("user", TEXT))


def test_chat_template_config(run, folder):
    call = ("generate", "--model", folder, "-p", TEXT, "-m", COUNT)
    off = run(*call, "--chat-template-config", '{"enable_thinking": false}')
    assert off.prompt_tokens == run(*call).prompt_tokens - 1, "no <think>"
    other = run(*call, "--chat-template-config", '{"greeting": "in the"}')
    assert other.prompt_tokens == templated(folder, ("user", TEXT), greeting="in the")


def test_chat_template_config_in_chat(run, folder, passes):
    off = ("--chat-template-config", '{"enable_thinking": false}')
    run("chat", "--model", folder, "-m", 1, "--temp", 0, *off, stdin=f"{TEXT}\nq\n")
    assert passes[0][1] == templated(folder, ("user", TEXT), enable_thinking=False)


def test_prefill_response(run, folder):
    call = ("generate", "--model", folder, "-p", TEXT, "-m", COUNT)
    tokenizer = load(folder)[1]
    result = run(*call, "--prefill-response", "in the end")
    shown = f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\nin the end"
    assert result.prompt_tokens == len(tokenizer.encode(shown))
    assert result.text != run(*call).text


@pytest.mark.parametrize(
    "flag", [("--system-prompt", "x"), ("--prefill-response", "x"), ("--chat-template-config", '{"a": 1}')], ids=str
)
def test_template_flags_without_a_template_are_refused(run, folder, bare, flag):
    assert_refused(run("generate", "--model", bare, *flag), flag[0], "template")
    assert_refused(run("generate", "--model", folder, "--ignore-chat-template", *flag), flag[0], "template")


@pytest.mark.parametrize("value", ["", "0"])
def test_an_empty_system_prompt_without_a_template_is_refused_too(run, bare, value):
    assert_refused(run("generate", "--model", bare, "--system-prompt", value), "--system-prompt", "template")


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_a_template_that_refuses(run, folder, tmp_path, verb):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no\nsuch role') }}")
    assert_refused(run(verb, "--model", tmp_path, stdin=f"{TEXT}\nq\n"), "the chat template refused")
    result = run(verb, "--model", folder, "--chat-template-config", '{"tokenize": false}', stdin=f"{TEXT}\nq\n")
    assert result.status == 1 and result.err.count("\n") == 1, result.err


# Thinking


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<think> at", True),
        ("<think>", True),
        ("<think> in </think> on", False),
        ("in", False),
        ("</think> in", False),
        ("<think> a </think> <think> b", True),
    ],
)
def test_the_hint_on_stopping_inside_a_thinking_block(run, folder, prompt, inside):
    result = run("generate", "--model", folder, "--ignore-chat-template", "-p", prompt, "-m", 1)
    assert "think" not in result.text, "the model wrote its own: choose another prompt"
    assert ("Hint: the text stopped inside a thinking block" in result.err) == inside
    assert "--max-tokens (now 1)" in result.err or not inside
    assert "Hint" not in result.out


def test_the_hint_counts_what_was_written(run, folder):
    """With whole turns of the template."""
    tokenizer = load(folder)[1]
    assert session.inside_thinking(tokenizer, [5, THINK, 6])
    assert not session.inside_thinking(tokenizer, [5, THINK, 6, THINK + 1, 7])
    on = run("generate", "--model", folder, "-p", TEXT, "-m", 3)
    off = run(
        "generate", "--model", folder, "-p", TEXT, "-m", 3, "--chat-template-config", '{"enable_thinking": false}'
    )
    assert "Hint" in on.err and off.err == ""


@pytest.mark.parametrize(
    ("prompt", "written", "inside"), [("<think> at", END_THINK, False), ("at", THINK, True), ("<think> at", 65, True)]
)
def test_the_hint_on_blocks_that_the_model_opens_and_closes(run, folder, monkeypatch, prompt, written, inside):
    module = sys.modules["mlx_moe.generation"]
    original = module.stream_generate
    force = make_logits_processors(logit_bias={written: 1e4})
    monkeypatch.setattr(module, "stream_generate", lambda *a, **k: original(*a, **k, logits_processors=force))
    result = run("generate", "--model", folder, "--ignore-chat-template", "-p", prompt, "-m", 2)
    assert ("Hint" in result.err) == inside


# Ctrl-C


@pytest.fixture
def interrupted(monkeypatch):
    """Raises KeyboardInterrupt after so many tokens, as the terminal does, in the next generation only."""
    module = sys.modules["mlx_moe.generation"]
    original = module.stream_generate

    def arrange(after: int) -> None:
        def stream(*args: Any, **kwargs: Any) -> Iterator[Any]:
            monkeypatch.setattr(module, "stream_generate", original)
            inner = original(*args, **kwargs)
            for _ in range(after):
                yield next(inner)
            inner.close()
            raise KeyboardInterrupt

        monkeypatch.setattr(module, "stream_generate", stream)

    return arrange


def test_ctrl_c(run, bare, write_text, interrupted, tmp_path):
    whole = write_text().text
    interrupted(3)
    result = run("generate", "--model", bare, "-p", TEXT, "-m", COUNT, "--stats-json", tmp_path / "s.json")
    assert result.status == 130
    assert whole.startswith(result.text) and result.text
    assert result.generated == 3
    assert "Peak memory" in result.out
    assert json.loads((tmp_path / "s.json").read_text())["finish_reason"] is None


def test_ctrl_c_before_any_text(run, bare, interrupted):
    interrupted(0)
    result = run("generate", "--model", bare, "-p", TEXT)
    assert result.status == 130
    assert "No text generated" in result.out


def test_ctrl_c_while_loading(run, bare, monkeypatch):
    def stop(args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "open_model", stop)
    for verb in MODEL_VERBS:
        needed = ["-p", "x", "--prompt-cache-file", "y"] if verb == "cache-prompt" else []
        result = run(verb, "--model", bare, *needed)
        assert result.status == 130 and "Traceback" not in result.err


# Prompt caches


@pytest.fixture(scope="session")
def cache_file(tmp_path_factory, bare) -> Path:
    path = tmp_path_factory.mktemp("cache") / "prompt.safetensors"
    assert main(["cache-prompt", "--model", str(bare), "-p", "then the rest", "--prompt-cache-file", str(path)]) == 0
    return path


def test_prompt_cache_file(write_text, cache_file):
    whole = write_text(prompt="then the rest of it")
    rest = write_text("--prompt-cache-file", cache_file, prompt=" of it")
    assert rest.text == whole.text
    assert rest.prompt_tokens < whole.prompt_tokens


def test_cache_prompt_says_what_it_saved(run, bare, tmp_path):
    path = tmp_path / "prompt.safetensors"
    call = ("cache-prompt", "--model", bare, "--prompt-cache-file", path)
    result = run(*call, "--prompt", "then the rest")
    tokens = len(load(bare)[1].encode("then the rest"))
    assert result.status == 0
    assert re.fullmatch(rf"Saved {tokens} tokens, \d+\.\d MB: {re.escape(str(path))}\n", result.out)
    assert [item.name for item in tmp_path.iterdir()] == ["prompt.safetensors"]
    size = path.stat().st_size
    assert run(*call, "-p", "-", stdin="then the rest" * 3).out.startswith("Saved ")
    assert path.stat().st_size > size, "standard input was read"


@pytest.mark.parametrize("name", ["prompt.bin", "prompt", "prompt.cache.safetensors"])
def test_cache_files_of_any_name(run, bare, write_text, tmp_path, name):
    path = tmp_path / name
    assert run("cache-prompt", "--model", bare, "-p", "then the rest", "--prompt-cache-file", path).status == 0
    assert [item.name for item in tmp_path.iterdir()] == [name]
    assert write_text("--prompt-cache-file", path, prompt=" of it").text == write_text(prompt=TEXT).text


def test_a_cached_prompt_is_continued_without_another_start_token(run, tmp_path):
    raw = short_config()
    folder = save_tokenizer(write(tmp_path / "m", raw, random_weights(raw, seed=7)), bos=True)
    path = tmp_path / "c.safetensors"
    run("cache-prompt", "--model", folder, "-p", "then the rest", "--prompt-cache-file", path)
    call = ("generate", "--model", folder, "-m", COUNT)
    rest, whole = run(*call, "-p", " of it", "--prompt-cache-file", path), run(*call, "-p", TEXT)
    assert rest.text == whole.text


def test_a_cached_prompt_of_a_chat_model_is_one_message(run, folder, tmp_path):
    """The template goes around the joined message: cached start and later rest equal the whole, system prompt too."""
    path = tmp_path / "c.safetensors"
    system = ("--system-prompt", "be brief")
    save = ("cache-prompt", "--model", folder, "-p", "then the rest", "--prompt-cache-file")
    assert run(*save, path, *system).status == 0
    call = ("generate", "--model", folder, "-m", COUNT)
    rest = run(*call, "-p", " of it", "--prompt-cache-file", path)
    whole = run(*call, "-p", TEXT, *system)
    assert rest.text == whole.text, rest.err
    raw = tmp_path / "raw.safetensors"
    ignore = "--ignore-chat-template"
    run(*save, raw, ignore)
    assert run(*call, "-p", " of it", "--prompt-cache-file", raw).text == run(*call, "-p", TEXT, ignore).text
    assert raw.stat().st_size < path.stat().st_size
    changed = run(*call, "-p", " of it", "--prompt-cache-file", path, "--chat-template-config", '{"greeting": "so"}')
    assert changed.prompt_tokens > rest.prompt_tokens
    assert_refused(run(*call, "-p", "x", "--prompt-cache-file", path, *system), "--system-prompt")


def test_a_cached_prompt_names_its_model(run, cache_file, write_text):
    """Without --model the model of the cache is loaded, as in mlx-lm."""
    found = run("generate", "-m", COUNT, "-p", " of it", "--prompt-cache-file", cache_file)
    assert found.text == write_text(prompt=TEXT).text, found.err


def test_cache_prompt_where_nothing_can_be_written(run, bare, tmp_path):
    result = run("cache-prompt", "--model", bare, "-p", "x", "--prompt-cache-file", tmp_path / "no" / "c.safetensors")
    assert_refused(result, "--prompt-cache-file")


def test_cache_prompt_of_nothing(run, bare, tmp_path):
    path = tmp_path / "c.safetensors"
    assert_refused(run("cache-prompt", "--model", bare, "-p", "", "--prompt-cache-file", path), "empty")
    assert not path.exists()


def test_damaged_cache_files(run, bare, cache_file, tmp_path):
    whole, path = cache_file.read_bytes(), tmp_path / "damaged.safetensors"
    call = ("generate", "--model", bare, "--prompt-cache-file", path)
    assert_refused(run(*call), "damaged.safetensors")
    for content in (b"", whole[:100], whole[:-1], whole + b"\0", b"hello" * 100):
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        assert_refused(run(*call), "damaged.safetensors")
    path.write_bytes((bare / "model.safetensors").read_bytes())
    assert_refused(run(*call), "damaged.safetensors", "prompt cache format")


def test_cache_files_of_another_model(run, bare, cache_file, tmp_path):
    for name, changes in (
        ("deep", {"num_hidden_layers": 3, "layer_types": None}),
        ("heads", {"num_key_value_heads": 4}),
    ):
        raw = short_config(**changes)
        other = save_tokenizer(write(tmp_path / name, raw, random_weights(raw)))
        assert_refused(run("generate", "--model", other, "--prompt-cache-file", cache_file), "another model")
    result = run("generate", "--model", bare, "--dtype", "bfloat16", "--prompt-cache-file", cache_file)
    assert_refused(result, "another dtype")


def test_template_flags_with_a_cache_file_are_refused(run, folder, cache_file):
    result = run("generate", "--model", folder, "--prompt-cache-file", cache_file, "--system-prompt", "x")
    assert_refused(result, "--system-prompt")


# chat


def chat(run, folder: Path, *argv: Any, lines: list[str], temp: float | None = 0) -> Result:
    given = [] if temp is None else ["--temp", temp]
    return run("chat", "--model", folder, "-m", 5, *given, *argv, stdin="".join(f"{line}\n" for line in lines))


def answers(result: Result) -> list[str]:
    """What stands between the prompts."""
    assert result.status == 0, result.err
    return result.out.removeprefix(HELP + "\n").split(">> ")[1:]


def test_chat_keys(run, folder):
    assert answers(chat(run, folder, lines=["q"])) == [""]
    assert answers(chat(run, folder, lines=["h", "  h ", "", "   ", "q"])) == [HELP + "\n", HELP + "\n", "", "", ""]
    assert answers(chat(run, folder, lines=[])) == ["\n"], "the end of input quits"
    first, second, _, again, _ = answers(chat(run, folder, lines=[TEXT, TEXT, "r", TEXT, "q"]))
    assert first == again != second, "r forgets the conversation"


def test_chat_answers(run, folder):
    generated = run("generate", "--model", folder, "-p", TEXT, "-m", 5)
    assert answers(chat(run, folder, lines=[TEXT, "q"]))[0] == generated.text + "\n"


def test_chat_needs_a_template(run, bare):
    assert_refused(chat(run, bare, lines=["q"]), "no chat template")


def test_chat_ctrl_c_stops_an_answer_only(run, folder, interrupted):
    whole = answers(chat(run, folder, lines=[TEXT, "q"]))[0].rstrip("\n")
    for after in (0, 2):
        interrupted(after)
        got = answers(chat(run, folder, lines=[TEXT, "r", TEXT, "q"]))
        assert whole.startswith(got[0].rstrip("\n")) and got[0].rstrip("\n") != whole
        assert got[2].rstrip("\n") == whole


def test_chat_ctrl_c_at_the_prompt_quits(run, folder, monkeypatch):
    def stop(prompt: str = "") -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", stop)
    assert run("chat", "--model", folder).status == 0


@pytest.mark.parametrize(
    ("own", "argv", "want"),
    [
        (None, [], THINKING),
        (None, ["--chat-template-config", '{"enable_thinking": false}'], ANSWERING),
        (None, ["--temp", "0.1"], Sampling(0.1, 0.95, 20)),
        (None, ["--top-p", "0.5", "--top-k", "0"], Sampling(1.0, 0.5, 0)),
        ({"temperature": 0.3, "top_p": 0.4, "top_k": 7}, [], Sampling(0.3, 0.4, 7)),
        ({"do_sample": True, "temperature": 0.3}, [], Sampling(0.3, 0.95, 20)),
        ({"do_sample": False, "temperature": 0.3}, [], THINKING),
        ({"temperature": 0.3}, ["--temp", "0.6"], Sampling(0.6, 0.95, 20)),
        ({"temperature": None, "top_k": 5}, [], Sampling(1.0, 0.95, 5)),
        ({"eos_token_id": 123}, [], THINKING),
    ],
    ids=str,
)
def test_chat_sampling_defaults(run, folder, tmp_path, sampler_settings, own, argv, want):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if own is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(own))
    assert chat(run, tmp_path, *argv, lines=["q"], temp=None).status == 0
    args = sampler_settings[-1]
    assert Sampling(args["temp"], args["top_p"], args["top_k"]) == want


@pytest.mark.parametrize("own", [{"temperature": "warm"}, {"top_k": [5]}, {"top_p": {}}], ids=str)
def test_sampling_settings_of_the_wrong_kind(tmp_path, own):
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    with pytest.raises(ValueError, match=r"generation_config\.json") as caught:
        chat_sampling(tmp_path, True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [1, 6])
def test_a_second_turn_is_a_fresh_conversation_with_the_same_history(folder, passes, count):
    model, tokenizer = load(folder)
    args = argparse.Namespace(
        system_prompt="be terse",
        chat_template_config={"enable_thinking": False},  # with an opened block the history never agrees
        max_tokens=count,
        prefill_step_size=2048,
    )
    first = Conversation(model, tokenizer, args, make_sampler(0.0))
    turns = [TEXT, "in the end", "at no time"]
    for i, text in enumerate(turns):
        history = list(first._messages)
        passes.clear()
        got = list(first.answer(text))
        fed = passes[0][1]
        fresh = Conversation(model, tokenizer, args, make_sampler(0.0))
        fresh._messages = history
        passes.clear()
        assert list(fresh.answer(text)) == got, f"turn {i + 1}"
        if count == 1 and i:
            assert fed < passes[0][1] - 10, "earlier turns were read again although the cache holds them"
        assert first._messages == fresh._messages


# Every flag


@pytest.fixture(scope="module")
def streamed(tmp_path_factory) -> Path:
    """A GGUF file of 40 experts per layer, of which a token uses 4."""
    return write_model(tmp_path_factory.mktemp("streamed") / "m.gguf", tokenizer=True)


PAGING = {
    (): (40, 12, True, False, True),
    ("--expert-slots", "9"): (9, 12, True, False, True),
    ("--memory", "of 9"): (9, 12, True, False, True),
    ("--io-threads", "3"): (40, 3, True, False, True),
    ("--no-read-ahead",): (40, 12, False, False, True),
    ("--read-by-token", "--expert-slots", "9"): (9, 12, True, True, True),
    ("--io", "buffered"): (40, 12, True, False, False),
    ("--memory", "9GB", "--resident"): (40, 12, True, False, True),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("flags", PAGING, ids=" ".join)
def test_paging(run, streamed, monkeypatch, flags):
    """Slots per layer, threads, read-ahead, also by token, direct reads; the text is the same."""
    seen, original = [], session.load

    def load(*args, **kwargs):
        model, tokenizer = original(*args, **kwargs)
        experts = model._experts
        direct = experts.reader.files._direct is not None
        by_token = experts._by_token is not None
        seen.append((model.experts_stats.slots, experts.reader._threads, experts._read_ahead, by_token, direct))
        return model, tokenizer

    monkeypatch.setattr(session, "load", load)
    monkeypatch.setattr(streaming, "can_be_direct", lambda *_: True)  # as of a file whose experts are aligned
    call = ("generate", "--model", streamed, "-p", "the test", "-m", "6", "--verbose", "F")
    size = f"{ceiling(streamed, 9) / 1e6 + 0.001:.3f}MB"
    given = [size if flag == "of 9" else flag for flag in flags]
    texts = [run(*call, *more).out for more in ((), given)]
    assert seen[1] == PAGING[flags] and texts[0] == texts[1]


def test_paging_that_cannot_be(run, streamed):
    call = ("generate", "--model", streamed, "-p", "x", "-m", "1")
    assert_refused(run(*call, "--memory", "much"), "'much' is not a size")
    assert_refused(run(*call, "--resident", "--memory", "1MB"), "are needed for 40 experts", "may be used")
    assert_refused(run(*call, "--resident", "--expert-slots", "9"), "leave one out")


MOCE = {
    (): None,
    ("--moce",): MoceConfig(),
    ("--moce", "--moce-bonus", "9"): MoceConfig(bonus=9),
    ("--moce", "--moce-keep-top", "0"): MoceConfig(keep_top=0),
    ("--moce", "--moce-max-rank", "5"): MoceConfig(max_rank=5),
    ("--moce", "--moce-max-rank", "none"): MoceConfig(max_rank=None),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("flags", MOCE, ids=" ".join)
def test_moce(run, streamed, monkeypatch, tmp_path, flags):
    """Settings reach the model (what each changes: tests/test_moce.py), and what they did the statistics."""
    seen, original = [], session.load
    monkeypatch.setattr(session, "load", lambda *a, **kw: seen.append(kw.get("moce")) or original(*a, **kw))
    call = ("generate", "--model", streamed, "-p", "the test", "-m", "4", "--verbose", "F", "--expert-slots", "9")
    assert run(*call, *flags, "--stats-json", tmp_path / "s.json").status == 0
    experts = json.loads((tmp_path / "s.json").read_text())["experts"]
    asked = moce_settings(tmp_path, seen[0])
    assert asked == (MOCE[flags] and replace(MOCE[flags], measure=True))
    if MOCE[flags] is None:
        assert experts["substituted"] == experts["kl"] == 0 and experts["agreement"] == 1
    elif "5" not in flags:
        assert experts["substituted"] > 0 < experts["kl"] and experts["agreement"] < 1


def test_moce_that_cannot_be(run, streamed):
    call = ("generate", "-p", "x", "-m", "1", "--model")
    for flag in ("--moce-bonus", "--moce-keep-top", "--moce-max-rank"):
        assert_refused(run(*call, streamed, flag, "2"), f"{flag} needs --moce")
    assert_refused(run(*call, streamed, "--moce", "--moce-bonus", "-1"), "moce bonus is -1.0; allowed: 0 or more")
    assert_refused(run(*call, streamed, "--moce", "--moce-max-rank", "3"), "moce max_rank is 3; allowed: at least 4")
    assert_refused(
        run(*call, streamed, "--moce", "--moce-max-rank", "x"), "'x' is not a whole number or 'none'", status=2
    )


USAGE = {
    (): ("usage", True, True),
    ("--no-usage",): ("empty", False, False),
    ("--no-usage", "--eviction", "frequency"): ("empty", True, False),
    ("--eviction", "lru"): ("usage", False, True),
    ("--seed-residency", "empty"): ("empty", True, True),
    ("--seed-residency", "profile"): ("empty", True, True),
}


@pytest.mark.parametrize("flags", USAGE, ids=" ".join)
def test_usage(run, streamed, monkeypatch, flags, tmp_path):
    """What a model starts with, who leaves memory, and whether it is remembered (more: tests/test_learned_usage.py)."""
    path = tmp_path / "m.gguf"
    path.write_bytes(Path(streamed).read_bytes())
    call = ("generate", "--model", path, "-p", "the test", "-m", "2", "--verbose", "F", "--expert-slots", "9")
    assert run(*call).status == 0
    seen, original = [], session.load
    monkeypatch.setattr(session, "load", lambda *a, **kw: seen.append(original(*a, **kw)) or seen[-1])
    before = path.with_name("m.gguf.usage").read_bytes()
    assert run(*call, *flags, "--stats-json", tmp_path / "s.json").status == 0
    experts, pager = json.loads((tmp_path / "s.json").read_text())["experts"], seen[0][0]._experts._pager
    seen.pop()[0].close()
    remembered = path.with_name("m.gguf.usage").read_bytes() != before
    assert (experts["seed"], pager._by_worth, remembered) == USAGE[flags]
    assert (experts["seed_hash"] is None) == (experts["seed"] == "empty")


# flag: the test that shows what it changes
def test_record_routing(run, streamed, tmp_path):
    """A readable recording of every pass; what is in it: tests/paging/test_replay.py."""
    call = ("generate", "--model", streamed, "-p", "the test", "-m", "4", "--expert-slots", "9")
    assert run(*call, "--record-routing", tmp_path / "t").status == 0
    trace = read_trace(tmp_path / "t")
    assert sum(event.accepted for event in trace.passes) >= 4 and not trace.cut


COVERED = {
    **dict.fromkeys(("--moce", "--moce-bonus", "--moce-keep-top", "--moce-max-rank"), test_moce),
    **dict.fromkeys(("--memory", "--expert-slots", "--resident"), test_paging),
    "--record-routing": test_record_routing,
    **dict.fromkeys(("--seed-residency", "--no-usage", "--eviction"), test_usage),
    **dict.fromkeys(("--io-threads", "--no-read-ahead", "--read-by-token", "--io"), test_paging),
    **dict.fromkeys(REFUSED, test_refused_flags),
    "--help": test_help_of_a_verb,
    "--model": test_model_and_its_default,
    "--dtype": test_dtype,
    "--mtp": test_mtp,
    "--prefill-step-size": test_prefill_step_size,
    "--prompt": test_prompt,
    "--prefill-response": test_prefill_response,
    "--max-tokens": test_max_tokens,
    "--extra-eos-token": test_extra_eos_token,
    "--ignore-chat-template": test_ignore_chat_template,
    "--verbose": test_verbose_off_prints_the_text_alone,
    "--prompt-cache-file": test_prompt_cache_file,
    "--stats-json": test_stats_json,
    "--profile": test_profile,
    "--system-prompt": test_system_prompt,
    "--chat-template-config": test_chat_template_config,
    "--temp": test_temp_and_seed,
    "--seed": test_temp_and_seed,
    "--top-p": test_top_k_top_p_and_min_p,
    "--top-k": test_top_k_top_p_and_min_p,
    "--min-p": test_top_k_top_p_and_min_p,
    "--min-tokens-to-keep": test_min_tokens_to_keep,
    "--xtc-probability": test_xtc,
    "--xtc-threshold": test_xtc,
    ("cache-prompt", "--prompt"): test_cache_prompt_says_what_it_saved,
    ("cache-prompt", "--system-prompt"): test_a_cached_prompt_of_a_chat_model_is_one_message,
    ("cache-prompt", "--ignore-chat-template"): test_a_cached_prompt_of_a_chat_model_is_one_message,
    ("cache-prompt", "--chat-template-config"): test_a_cached_prompt_of_a_chat_model_is_one_message,
    ("cache-prompt", "--prompt-cache-file"): test_cache_prompt_says_what_it_saved,
    ("chat", "--model"): test_chat_answers,
    ("chat", "--max-tokens"): test_max_tokens_in_chat,
    ("chat", "--system-prompt"): test_system_prompt_in_chat,
    ("chat", "--chat-template-config"): test_chat_template_config_in_chat,
    **{("chat", flag): test_sampling_flags_reach_the_sampler for flag in SAMPLING},
}


@pytest.mark.parametrize("verb", MODEL_VERBS)
def test_every_flag_has_its_test(verb, monkeypatch, run):
    parsers = []
    original = options.parser
    monkeypatch.setattr(options, "parser", lambda *args: parsers.append(original(*args)) or parsers[-1])
    assert run(verb, "--help").status == 0
    for action in parsers[0]._actions:
        assert action.option_strings, f"{verb} has a positional argument"
        own = [(verb, name) for name in action.option_strings]
        shown = [COVERED[name] for name in [*own, *action.option_strings] if name in COVERED]
        assert shown, f"mlx-moe {verb} {action.option_strings[0]}: no test shows what it changes; add it to COVERED"


def test_the_verbs_are_modules():
    for verb in VERBS:
        module = importlib.import_module(f"mlx_moe.cli.{verb.replace('-', '_')}")
        assert callable(module.main) and module.__doc__


@pytest.mark.parametrize(
    "setting",
    ["--temp=-1", "--temp=nan", "--top-p=1.5", "--min-p=-0.1", "--top-k=100000", "--top-k=-1", "--min-tokens-to-keep=0",
     "--xtc-probability=2", "--xtc-threshold=0.6"],
)  # fmt: skip
def test_sampling_settings_out_of_range(run, bare, setting):
    """mlx-lm takes some of them silently and fails in mid-text at others."""
    assert_refused(run("generate", "--model", bare, "-p", "x", setting), setting.split("=")[0], "allowed")


def test_cache_prompt_with_a_template_that_gives_text(run, folder, tmp_path):
    """As for generate and chat: one line, not a traceback."""
    call = ("cache-prompt", "--model", folder, "-p", "x", "--prompt-cache-file", tmp_path / "c.safetensors")
    assert_refused(run(*call, "--chat-template-config", '{"tokenize": false}'), "not token ids")
    assert not list(tmp_path.iterdir())
