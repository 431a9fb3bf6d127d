"""The checks that run on a user's machine: right kernels pass, wrong ones are named, and a hash tells texts apart."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

from custom_kernels import checks, dispatch
from custom_kernels.checks import FELLOWS, WINDOWS, check, every_kernel, kernel_hash, one_line, run_check
from custom_kernels.ggml_blocks import F8_E4M3, FORMATS
from custom_kernels.ggml_blocks.device import has_decoder
from custom_kernels.moce_route import kernel as route
from custom_kernels.moce_route.reference import Policy, naive_moce_route
from custom_kernels.portable import Launch, PortableKernel
from custom_kernels.slots import NO_SLOT
from simulated import WRONG_BASE, change_kernel

ALL = list(every_kernel())
KERNELS = [*ALL, ("expert_gate_up", "IQ2_XS+IQ4_NL")]


def test_every_kernel_has_a_check():
    formats = [format.name for format in (*FORMATS, F8_E4M3) if has_decoder(format)]
    for op in ("block_gemv", "block_dequantize", "expert_down", "expert_dequantize"):
        assert [variant for other, variant in ALL if other == op] == formats
    assert ("expert_gate_up", "IQ2_XS+IQ2_XS") in ALL
    chosen = {
        op
        for path in Path(dispatch.__file__).parent.rglob("*.py")
        for op in re.findall(r'choose\("(\w+)"', path.read_text())
    }
    assert chosen == {op for op, _ in ALL}, "each op that chooses a back end is checked"


@pytest.mark.sample(5)
@pytest.mark.parametrize(("op", "variant"), KERNELS, ids=map(" ".join, KERNELS))
def test_right_kernels_pass(simulated_gpu, op, variant):
    verdict = run_check(check(op, variant), "metal")
    assert verdict.ok and verdict.message == "" and verdict.microseconds is None
    assert 0 <= verdict.error < 1e-5


@pytest.mark.parametrize(("op", "output"), [("gdn_step", "out"), ("gdn_commit", "last"), ("moce_route", "weights")])
def test_wrong_kernels_fail_and_name_the_output(simulated_gpu, monkeypatch, op, output):
    change_kernel(monkeypatch, op, header=WRONG_BASE)
    verdict = run_check(check(op), "metal", calls=1)
    assert not verdict.ok and verdict.error > 1e-3
    assert re.match(rf"window of \d, \w+: {output} is off by ", verdict.message), verdict.message


@pytest.mark.parametrize(
    ("header", "start", "message"),
    [
        ("#error no such chip", "", "no such chip"),
        ("", "return;", "out is off by"),
        ("", "if (gid.x == 299) return;", "out is off by"),
        ("#define fma(a, b, c) NAN\n", "", "out holds NaN or infinity"),
    ],
    ids=["does not compile", "writes nothing", "leaves one column out", "NaN"],
)
def test_kernels_that_give_nothing(simulated_gpu, monkeypatch, header, start, message):
    change_kernel(monkeypatch, "expert_combine", header, start)
    verdict = run_check(check("expert_combine"), "metal")
    assert not verdict.ok and message in verdict.message, verdict
    assert "\n" not in verdict.message and len(verdict.message) < 400


def test_ties_the_wrong_way_round_are_found(monkeypatch):
    def to_the_higher_id(launch: Launch, backend: str, poison: float | None = None) -> list[mx.array]:
        logits, words, _ = launch.inputs
        policy = Policy(max_rank=10) if len(logits) == 1 else Policy(0.85, 3, 24)
        got = naive_moce_route(logits[:, ::-1], words[::-1], 10, policy)
        return [299 - got.ids, *got[1:]]

    monkeypatch.setattr(Launch, "run", to_the_higher_id)
    verdict = run_check(check("moce_route"), "metal")
    assert not verdict.ok and verdict.message.startswith("window of 1, float32: ids is off by ")


def test_a_wrong_type_of_window_fails_too(monkeypatch):
    """The second window, in bfloat16, alone is wrong."""
    wrong = check("block_gemv", "Q8_0")
    monkeypatch.setattr(Launch, "run", _perfect(wrong, spoil=1))
    verdict = run_check(wrong, "metal")
    assert not verdict.ok and verdict.message.startswith("window of 3, bfloat16: y is off by ")


def _perfect(one: checks.Check, spoil: int | None = None):
    """A ``Launch.run`` that gives what the reference gives; of sample ``spoil`` a little more."""
    expected = {id(sample.launch): sample.expected() for sample in one.samples}

    def run(launch: Launch, backend: str, poison: float | None = None) -> list[mx.array]:
        wrong = spoil is not None and launch is one.samples[spoil].launch
        return [out * 1.1 if wrong else out for out in expected[id(launch)]]

    return run


def test_times_are_taken_when_asked_for(monkeypatch):
    one = check("expert_combine")
    monkeypatch.setattr(Launch, "run", _perfect(one))
    assert run_check(one, "metal").microseconds is None
    assert 0 < run_check(one, "metal", calls=2).microseconds < 1e6
    assert 0 < checks.time_reference(one, calls=1) < 1e6


def test_errors_of_mlx_are_one_line(monkeypatch):
    def fail(launch: Launch, backend: str, poison: float | None = None) -> list[mx.array]:
        raise RuntimeError("[metal::Device] Unable to build\n\x1b[31merror\x1b[0m: use of undeclared\n" * 40)

    monkeypatch.setattr(Launch, "run", fail)
    verdict = run_check(check("moce_route"), "metal")
    assert not verdict.ok and verdict.error is None
    assert verdict.message.startswith("window of 1, float32: [metal::Device] Unable to build")
    assert len(verdict.message) < 400 and verdict.message.isprintable()


@pytest.mark.parametrize(("op", "variant"), ALL, ids=map(" ".join, ALL))
def test_windows_and_missing_experts(op, variant):
    """One token and several; where slot words go in, one of them is of no expert in memory."""
    one, several = (sample.launch for sample in check(op, variant).samples)
    if "words" in one.kernel.inputs:
        for launch in (one, several):
            words = launch.inputs[launch.kernel.inputs.index("words")]
            assert 0 < (words == NO_SLOT).sum().item() < words.size
    if op != "block_dequantize":
        (few, _), (many, _) = WINDOWS
        assert few == 1 and many > 1
        assert several.inputs[0].size > one.inputs[0].size or op == "gdn_commit"


def test_samples_are_the_same_each_time():
    first, second = (check("expert_down", "IQ4_NL").samples for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(mx.array_equal(x, y) for x, y in zip(a.launch.inputs, b.launch.inputs, strict=True))


def test_hash(monkeypatch):
    """Every text that would be compiled counts, and how it is launched."""
    good = route.MOCE_ROUTE
    seen = {kernel_hash(check("moce_route"), backend) for backend in ("metal", "cuda")}
    assert kernel_hash(check("moce_route"), "metal") in seen and len(seen) == 2, "the same text, the same hash"
    inputs = [*good.inputs[:2], "gain"]
    for kernel in (
        PortableKernel(good.name, good.inputs, good.outputs, good.body + " ", good.header),
        PortableKernel(good.name, good.inputs, good.outputs, good.body, good.header + " "),
        PortableKernel(good.name, inputs, good.outputs, good.body, good.header),
        PortableKernel(good.name + "_2", good.inputs, good.outputs, good.body, good.header),
    ):
        monkeypatch.setattr(route, "MOCE_ROUTE", kernel)
        seen.add(kernel_hash(check("moce_route"), "metal"))
    monkeypatch.setattr(route, "MOCE_ROUTE", good)
    monkeypatch.setattr(route, "MAX_THREADS", 128)
    seen.add(kernel_hash(check("moce_route"), "metal"))
    assert len(seen) == 7 and all(re.fullmatch("[0-9a-f]{64}", digest) for digest in seen)


def test_hashes_of_variants_differ():
    digests = [kernel_hash(check(*one), "metal") for one in ALL]
    assert len(set(digests)) == len(ALL) == 99


@pytest.mark.parametrize(
    ("op", "variant", "reason"),
    [
        ("gdn", "", "'gdn' has no kernel"),
        ("gdn_step", "IQ2_XS", "needed: 0 block format"),
        ("block_gemv", "", "needed: 1 block format"),
        ("block_gemv", "Q3_K", "'Q3_K' is not supported"),
        ("expert_gate_up", "IQ2_XS", "needed: 2 block format"),
        ("expert_down", "IQ2_XS+IQ2_XS", "needed: 1 block format"),
    ],
)
def test_what_has_no_kernel_is_refused(op, variant, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        check(op, variant)


def test_fellows_name_each_other():
    assert all(FELLOWS[fellow] == op for op, fellow in FELLOWS.items())
    assert {op for op, _ in ALL} >= FELLOWS.keys()


def test_one_line():
    assert one_line("a\n\tb\x1b[2J\x07 ‮c" + "x" * 500) == "a b[2J c" + "x" * 292
