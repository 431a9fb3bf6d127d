"""The machinery: cache, child processes, buffers, where it cannot run, the other architecture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from metal_sim import MetalError, compiler, needs_simulator, why_not
from metal_sim.buffers import GuardedBuffer, Place

TESTS = Path(__file__).resolve().parent.parent

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import mlx.core as mx
from metal_sim import verify
kernel = mx.fast.metal_kernel(name="c", input_names=["x"], output_names=["o"],
                              source="uint i = thread_position_in_grid.x; o[i] = x[i] + 41;")
(y,) = verify(kernel, inputs=[mx.ones(32)], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(32,)],
              output_dtypes=[mx.float32])
assert y.tolist() == [42.0] * 32
"""


@needs_simulator
def test_processes_share_an_empty_cache(tmp_path):
    """Two processes that start at once compile the same kernel and leave one library, and nothing half-made."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", SCRIPT, str(TESTS)], env=environment) for _ in range(2)]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    (folder,) = tmp_path.iterdir()
    assert sorted(p.suffix for p in folder.iterdir()) == [".o", ".so"]
    assert folder.stat().st_mode & 0o777 == 0o700


@needs_simulator
def test_second_run_compiles_nothing(run_body, monkeypatch):
    run_body("o[i] = x[i] + 1;")
    monkeypatch.setattr(compiler, "_zig", lambda *_: pytest.fail("compiled again"))
    run_body("o[i] = x[i] + 1;")


@needs_simulator
def test_nothing_is_written_beside_the_tests(run_body):
    def files() -> set[Path]:
        return {p for p in TESTS.rglob("*") if "__pycache__" not in p.parts and ".pytest_cache" not in p.parts}

    before = files()
    run_body("o[i] = x[i] + 2;")
    assert files() == before
    assert not compiler.cache_folder().is_relative_to(TESTS.parent)


@needs_simulator
def test_a_crash_stays_in_the_child(run_body):
    """A fault leaves this process able to go on."""
    with pytest.raises(MetalError, match="in no buffer"):
        run_body("o[i] = ((device const float*)(size_t)(i * 4))[0];")
    (output,) = run_body("o[i] = x[i] * 3;")
    assert mx.array_equal(output, mx.arange(256) * 3.0)


@needs_simulator
def test_messages_of_calls_that_do_not_fit(run_body):
    with pytest.raises(TypeError, match="complex64"):
        run_body("o[i] = x[i];", inputs=[mx.zeros(256, mx.complex64)], template=[("T", mx.float32)])


@needs_simulator
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_runtime_compiles_for_both_architectures(machine, tmp_path):
    made = compiler.compile_runtime(machine, tmp_path / "runtime.o")
    assert made.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (("sys.platform", "darwin"), "runs on Linux"),
        (("sys.platform", "win32"), "runs on Linux"),
        (("platform.machine", lambda: "riscv64"), "not on riscv64"),
        (("importlib.util.find_spec", lambda _: None), "pip install ziglang"),
    ],
)
def test_says_why_not(monkeypatch, patch, reason):
    target, value = patch
    if sys.platform != "linux" and reason != "runs on Linux":
        pytest.skip("the reason here is the system")
    monkeypatch.setattr(f"metal_sim.compiler.{target}", value)
    said = why_not.__wrapped__()
    assert reason in said
    assert "\n" not in said


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guard pages are laid out for Linux")
class TestGuardedBuffer:
    @pytest.mark.parametrize("place", list(Place))
    @pytest.mark.parametrize("nbytes", [1, 15, 16, 4095, 4096, 4097])
    def test_lies_at_its_guard_page(self, place, nbytes):
        buffer = GuardedBuffer(nbytes, data=bytes(nbytes), alignment=1, place=place)
        assert buffer.read() == bytes(nbytes)
        assert buffer.overrun() is None
        page = os.sysconf("SC_PAGESIZE")
        edge = buffer.address + nbytes if place is Place.END else buffer.address
        assert edge % page == 0

    def test_alignment(self):
        assert GuardedBuffer(17, alignment=16).address % 16 == 0

    @pytest.mark.parametrize("offset", [-3, 17, 18])
    def test_overrun_is_seen_where_no_guard_page_is(self, offset):
        import ctypes

        buffer = GuardedBuffer(17, data=bytes(17), alignment=16)
        ctypes.memset(buffer.address + offset, 1, 1)
        assert buffer.overrun() == offset
