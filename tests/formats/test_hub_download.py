"""Downloads through the real client, from a local server that speaks the Hub's API."""

from __future__ import annotations

import errno
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import huggingface_hub.file_download
import mlx.core as mx
import pytest

from checkpoints import random_weights, write
from gguf_models import write_gguf
from gguf_writer import encode
from hub_server import COMMIT, Hub, serving
from mlx_moe import load, load_model
from mlx_moe.cli import main
from mlx_moe.config import ConfigError, ModelConfig
from mlx_moe.formats import hub_client
from mlx_moe.formats.hub import AmbiguousError, Plan, Request, download, local_copy, resolve
from mlx_moe.formats.hub_client import HubError, UnreachableError
from mlx_moe.formats.safetensors import FileFormatError
from tiny_tokenizer import save_tokenizer, short_config

REPO = "org/tiny"
MB = 1 << 20
CHUNK = 1 << 16
OTHERS = {
    "README.md": b"# tiny", ".gitattributes": b"x", "pytorch_model.bin": b"pickle", "model.pt": b"pickle",
    "modeling_tiny.py": b"raise SystemExit", "figure.png": b"png", "training.json": b"{}",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> dict[str, bytes]:
    """The files of a tiny model in three shards with its tokenizer."""
    raw = short_config()
    folder = write(tmp_path_factory.mktemp("model"), raw, random_weights(raw, seed=7), files=3)
    save_tokenizer(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    weight_map = {
        tensor: name for name in files if name.endswith(".safetensors") for tensor in mx.load(str(folder / name))
    }
    return files | {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}


@pytest.fixture
def hub(tmp_path, monkeypatch, model) -> Iterator[Hub]:
    """A server, and a client that knows no other Hub and no other cache."""
    with serving(Hub()) as hub:
        hub.repos[REPO] = {**model, **OTHERS}
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        monkeypatch.setattr(hub_client, "PAUSES_S", (0,))
        monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", lambda seconds: None)
        yield hub


@pytest.fixture
def large(hub) -> bytes:
    """A GGUF of 2 MB as the repository's only file."""
    data = gguf(2 * MB)
    hub.repos[REPO] = {"big.gguf": data}
    return data


def gguf(size: int, architecture: str = "qwen4exp") -> bytes:
    head = encode({"general.architecture": architecture})
    return head + os.urandom(min(size - len(head), MB)) + bytes(max(0, size - len(head) - MB))


def many(*names: str, count: int = 2, size: int = 3000) -> dict[str, bytes]:
    """Several quantisations, each in its folder."""
    return {f"{n}/m-{n}-{i:05d}-of-{count:05d}.gguf": gguf(size) for n in names for i in range(1, count + 1)}


def refusal(kind: type[Exception], call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert message.startswith(f"{REPO}: ") and "\n" not in message, message
    return message


def switch_off(monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


# A folder of safetensors


def test_load_fetches_what_the_loader_needs_and_nothing_else(hub, model):
    network, tokenizer = load(REPO)
    assert network(mx.array([tokenizer.encode("the")])).shape[-1] == 128
    assert hub.fetched == set(model)
    assert sum(hub.served.values()) == sum(map(len, model.values())), "each file once"


def test_the_snapshot_of_links_loads_without_the_hub(hub, monkeypatch):
    folder = download(Request(REPO))
    assert all(path.is_symlink() for path in folder.iterdir())
    switch_off(monkeypatch)
    before = len(hub.seen)
    assert local_copy(Request(REPO)) == resolve(REPO) == folder
    assert load(REPO)[0] is not None and load(folder)[0] is not None
    assert len(hub.seen) == before


def test_the_hub_is_asked_once_more_and_sends_nothing_again(hub):
    download(Request(REPO))
    before = hub.served.total()
    plans: list[Plan] = []
    download(Request(REPO), show=plans.append)
    assert (hub.served.total(), plans[0].needed_bytes) == (before, 0)


def test_what_is_planned_is_what_comes(hub, model):
    plans: list[Plan] = []
    folder = download(Request(REPO), show=plans.append)
    plan = plans[0]
    assert {file.path for file in plan.files} == {path.name for path in folder.iterdir()} == set(model)
    assert plan.needed_bytes == sum(
        len(model[name]) for name in set(model) - {"config.json", "model.safetensors.index.json"}
    )
    assert plan.commit == folder.name == COMMIT


@pytest.mark.parametrize("revision", ["v1", "main", COMMIT])
def test_revisions(hub, revision, monkeypatch):
    folder = download(Request(REPO, revision=revision))
    switch_off(monkeypatch)
    assert resolve(REPO, revision) == folder
    if revision == "v1":
        assert "--revision v1" not in refusal(UnreachableError, resolve, REPO)
        assert "fetch it with: mlx-moe download org/tiny --revision v2" in refusal(
            HubError, local_copy, Request(REPO, revision="v2")
        )


def test_another_model_is_refused_before_anything_large(hub):
    hub.repos[REPO]["config.json"] = b'{"model_type": "llama"}'
    message = refusal(ConfigError, resolve, REPO, check=ModelConfig.from_path)
    assert "llama" in message
    assert hub.fetched == {"config.json", "model.safetensors.index.json"}


def test_a_file_that_the_index_names_and_the_repository_lacks(hub):
    del hub.repos[REPO]["model-00002-of-00003.safetensors"]
    assert "lacks model-00002-of-00003.safetensors" in refusal(HubError, resolve, REPO)
    assert hub.fetched == {"config.json", "model.safetensors.index.json"}


def test_into_a_folder(hub, model, tmp_path):
    request = Request(REPO, folder=tmp_path / "my model")
    assert "fetch it with: mlx-moe download org/tiny --dir '" in refusal(HubError, local_copy, request)
    assert download(request) == local_copy(request) == request.folder
    assert {path.name for path in request.folder.iterdir()} == {*model, ".cache"}
    assert load(request.folder)[0] is not None
    before = hub.served.total()
    download(request)
    assert hub.served.total() == before
    (request.folder / "model-00003-of-00003.safetensors").unlink()
    message = refusal(HubError, local_copy, request)
    assert "1 of 3 weight files missing here, first model-00003-of-00003.safetensors" in message


# Broken connections and damaged files


def test_a_cut_connection_goes_on_where_it_stopped(hub, large):
    hub.cuts["big.gguf"] = [CHUNK, MB, 3 * CHUNK]  # the first is the look at the header
    assert download(Request(REPO)).read_bytes() == large
    starts = [start for method, path, start in hub.seen if method == "GET"]
    assert starts[1] == 0 and len(starts) == 4 and 0 < starts[2] < starts[3], starts
    assert hub.served["big.gguf"] <= len(large) + 4 * CHUNK, "sent twice"


def test_a_connection_that_stays_broken(hub, large):
    hub.cuts["big.gguf"] = [CHUNK, MB] + [0] * 100
    message = refusal(UnreachableError, download, Request(REPO))
    assert "check the connection and start again" in message
    hub.cuts.clear()
    assert download(Request(REPO)).read_bytes() == large


def test_complete_files_are_kept(hub, model):
    path = "model-00002-of-00003.safetensors"
    hub.cuts[path] = [0] * 100
    refusal(UnreachableError, download, Request(REPO))
    message = refusal(HubError, local_copy, Request(REPO))
    assert f"1 of 3 weight files missing here, first {path}; go on with: mlx-moe download {REPO}" in message
    hub.cuts.clear()
    before = hub.served.total()
    download(Request(REPO))
    assert hub.served.total() - before == len(model[path])


def test_a_server_in_trouble_is_asked_again(hub, monkeypatch):
    attempts = []
    original = hub_client._fetch_once

    def once(*args):
        attempts.append(args)
        if len(attempts) == 1:
            raise TimeoutError("slow")
        return original(*args)

    monkeypatch.setattr(hub_client, "_fetch_once", once)
    download(Request(REPO))
    assert len(attempts) == 2


def test_a_file_shorter_than_listed(hub, large):
    hub.listed["big.gguf"] = len(large) + 1
    assert f"big.gguf is not {len(large) + 1} bytes long" in refusal(HubError, download, Request(REPO))
    assert "no weights" in refusal(HubError, local_copy, Request(REPO)), "it must not stay"


def test_a_damaged_file_in_the_cache_is_fetched_again(hub, large):
    path = download(Request(REPO))
    path.resolve().write_bytes(large[:1000])
    assert download(Request(REPO)).read_bytes() == large


def test_paths_that_lead_out_of_the_repository(hub, tmp_path):
    """What is not as long as listed is removed from the cache: once, from wherever the listing said."""
    mine = [tmp_path / "mine.json", tmp_path / "cache" / "mine.json"]
    mine[1].parent.mkdir()
    hub.repos[REPO] |= {"../../../mine.json": b"", "../../../../mine.json": b"", str(mine[0]): b""}
    for path in mine:
        path.write_text("precious")
    download(Request(REPO))
    assert [path.read_text() for path in mine] == ["precious"] * 2


def test_a_commit_that_is_none(hub):
    hub.commit = "../../.."
    assert "as its commit" in refusal(HubError, download, Request(REPO))


def test_the_reason_and_what_is_missing(hub):
    hub.cuts["model-00002-of-00003.safetensors"] = [0] * 100
    message = refusal(HubError, resolve, REPO)
    assert "check the connection" in message and message.endswith(f"safetensors; go on with: mlx-moe download {REPO}")


def test_a_partial_snapshot_names_what_is_missing(hub, monkeypatch):
    folder = download(Request(REPO))
    for name in ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        (folder / name).unlink()
    (folder / "model-00002-of-00003.safetensors").resolve().unlink()  # a link to nothing
    switch_off(monkeypatch)
    for call in (lambda: local_copy(Request(REPO)), lambda: load(REPO)):
        message = refusal(HubError, call)
        assert "3 of 3 weight files missing here, first model-00001-of-00003.safetensors" in message
        assert message.endswith(f"go on with: mlx-moe download {REPO}")


# The disk


def test_a_large_download_is_announced(hub, large, monkeypatch, caplog):
    download(Request(REPO))
    assert not caplog.records
    monkeypatch.setattr("mlx_moe.formats.hub._LARGE_BYTES", MB)
    shutil.rmtree(huggingface_hub.constants.HF_HUB_CACHE)
    download(Request(REPO))
    assert "org/tiny: fetching 2.1 MB of 1 files to " in caplog.text and "are free" in caplog.text


def test_too_little_space(hub, large, monkeypatch, tmp_path):
    blobs = tmp_path / "cache" / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "x.incomplete").write_bytes(bytes(5000))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=MB))
    message = refusal(HubError, download, Request(REPO))
    assert "2.1 MB to fetch, 1.0 MB free in" in message and "5.0 kB of interrupted downloads" in message
    assert [method for method, *_ in hub.seen] == ["GET"], "one look at the header, and nothing was fetched"
    message = refusal(HubError, download, Request(REPO, folder=tmp_path / "other"))
    assert f"free in {tmp_path / 'other'}; free some" in message


def test_what_is_here_already_needs_no_space(hub, monkeypatch):
    folder = download(Request(REPO))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert download(Request(REPO)) == folder


def test_a_disk_that_fills_up(hub, large, monkeypatch):
    def http_get(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub.file_download, "http_get", http_get)
    assert "the disk is full" in refusal(HubError, download, Request(REPO))


def test_a_cache_that_cannot_be_written(hub, tmp_path, monkeypatch):
    def denied(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(hub_client, "fetch_small", denied)
    assert "HF_HOME" in refusal(HubError, download, Request(REPO))


# GGUF


def test_one_of_several_quantisations(hub):
    hub.repos[REPO] = many("UD-Q2_K_XL", "UD-Q4_K_XL") | {"mmproj-F16.gguf": b"GGUF", "config.json": b"{}"}
    message = refusal(AmbiguousError, download, Request(REPO))
    assert "m-UD-Q2_K_XL (6.0 kB), m-UD-Q4_K_XL (6.0 kB)" in message
    assert message.endswith("mlx-moe download org/tiny --include '*Q2_K_XL*'")
    assert not hub.fetched
    first = download(Request(REPO, ("*Q2_K_XL*",)))
    assert first.name == "m-UD-Q2_K_XL-00001-of-00002.gguf"
    assert hub.fetched == {f"UD-Q2_K_XL/m-UD-Q2_K_XL-0000{i}-of-00002.gguf" for i in (1, 2)}


def test_the_quantisation_in_the_cache_is_the_one_that_is_used(hub, monkeypatch):
    hub.repos[REPO] = many("A", "B")
    first = download(Request(REPO, ("*B-0*",)))
    assert resolve(REPO) == first
    (first.parent / "m-B-00002-of-00002.gguf").unlink()
    message = refusal(HubError, resolve, REPO)
    assert "first B/m-B-00002-of-00002.gguf" in message and "--include 'B/m-B-*-of-00002.gguf'" in message
    download(Request(REPO, ("*B-0*",)))
    download(Request(REPO, ("*A-0*",)))
    assert "2 models are here" in refusal(AmbiguousError, resolve, REPO)
    assert local_copy(Request(REPO, ("*B-0*",))) == first
    assert "has no model file that matches '*C*'" in refusal(HubError, local_copy, Request(REPO, ("*C*",)))


def test_a_gguf_repository_loads(hub, tmp_path):
    raw = short_config()
    path = write_gguf(tmp_path / "m.gguf", raw, random_weights(raw, seed=7))
    hub.repos[REPO] = {"Q8_0/m-Q8_0.gguf": path.read_bytes()}
    assert load_model(REPO)[0](mx.array([[1, 2, 3]])).shape == (1, 3, 128)


def test_the_draft_layer_comes_along(hub):
    hub.repos[REPO] = {"m-Q2_K.gguf": gguf(MB), "mtp-Q8_0.gguf": gguf(1000), "mtp-F16.gguf": gguf(2000)}
    first = download(Request(REPO))
    assert {path.name for path in first.parent.iterdir()} == {"m-Q2_K.gguf", "mtp-Q8_0.gguf"}


def test_a_shard_that_the_repository_lacks(hub):
    hub.repos[REPO] = many("A", count=3)
    del hub.repos[REPO]["A/m-A-00003-of-00003.gguf"]
    assert "lacks A/m-A-00003-of-00003.gguf" in refusal(HubError, download, Request(REPO))


def test_a_gguf_of_another_architecture_is_refused_by_its_first_bytes(hub):
    hub.repos[REPO] = {"a.gguf": gguf(40 * MB, "llama")}
    assert "a.gguf: general.architecture is 'llama'; supported: qwen4exp" in refusal(
        ConfigError, download, Request(REPO)
    )
    assert hub.served["a.gguf"] < 40 * MB, "the rest stayed where it is"


def test_a_gguf_that_is_none(hub):
    hub.repos[REPO] = {"a.gguf": b"version https://git-lfs.github.com/spec/v1\n"}
    assert "is not a GGUF file" in refusal(FileFormatError, download, Request(REPO))


# What else the Hub may answer


def test_no_such_repository(hub):
    with pytest.raises(
        HubError, match=r"^org/none: no such folder, and no such repository on the Hub; if it is private"
    ):
        resolve("org/none")


def test_gated(hub):
    hub.gated.add(REPO)
    assert "is gated; accept its terms" in refusal(HubError, resolve, REPO)


def test_no_such_revision(hub):
    assert "has no revision 'nightly'" in refusal(HubError, resolve, REPO, "nightly")


def test_a_repository_without_a_model(hub):
    hub.repos[REPO] = OTHERS
    assert "nothing to run" in refusal(HubError, resolve, REPO)


def test_offline_by_setting_and_by_accident(hub, monkeypatch):
    switch_off(monkeypatch)
    assert "unset HF_HUB_OFFLINE" in refusal(UnreachableError, resolve, REPO)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "check the connection" in refusal(UnreachableError, resolve, REPO)


def test_the_cache_does_where_the_hub_is_silent(hub, monkeypatch):
    folder = download(Request(REPO))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve(REPO) == folder


# The command


@pytest.fixture
def run(hub, capsys):
    def call(*argv: str) -> tuple[int, str, str]:
        status = main(["download", *argv])
        return status, *capsys.readouterr()

    return call


def test_the_command_shows_what_comes_first(run, hub, model):
    status, out, _ = run(REPO)
    lines = out.splitlines()
    assert status == 0
    assert lines[0] == "org/tiny at main (c0ffee00)"
    assert "  model-*-of-00003.safetensors (3 files)" in out
    assert f"  in {len(model)} files" in out and "  to fetch" in out and "  free in " in out
    assert lines[-1].startswith("Ready: ") and Path(lines[-1][7:]).is_dir()
    assert not any(name in out for name in OTHERS)


def test_revision_and_dir(run, tmp_path):
    status, out, _ = run(REPO, "--revision", "v1", "--dir", str(tmp_path / "there"))
    assert status == 0 and f"Ready: {tmp_path / 'there'}\n" in out and " at v1 " in out
    status, _, err = run(REPO, "--revision", "v2")
    assert status == 1 and err == (
        "mlx-moe: error: org/tiny: has no revision 'v2'; --revision takes a branch, a tag or a commit of it\n"
    )


def test_local_only(run, hub):
    status, _, err = run(REPO, "--local-only")
    assert status == 1 and "fetch it with: mlx-moe download org/tiny\n" in err
    run(REPO)
    before = len(hub.seen)
    status, out, _ = run(REPO, "--local-only")
    assert status == 0 and out.startswith("Ready: ") and len(hub.seen) == before


def test_include(run, hub):
    hub.repos[REPO] = many("UD-Q2_K_XL", "UD-IQ1_M")
    status, out, err = run(REPO)
    assert status == 1 and err.count("\n") == 1
    assert out.splitlines() == ["      6.0 kB  --include '*IQ1_M*'", "      6.0 kB  --include '*Q2_K_XL*'"]
    status, out, _ = run(REPO, "--include", "*IQ1_M*")
    assert status == 0 and out.endswith("UD-IQ1_M/m-UD-IQ1_M-00001-of-00002.gguf\n")


def test_many_files_are_counted(run, hub, monkeypatch):
    hub.repos[REPO] |= {f"t{i}.jinja": b"" for i in range(20)}
    out = run(REPO)[1]
    assert "  and 13 more" in out and len(out.splitlines()) == 18
    assert out.splitlines()[1].endswith("model-*-of-00003.safetensors (3 files)"), "the largest first"


def test_errors_of_use(run):
    for argv in ([], [REPO, "--nonsense"], [REPO, "other"], [REPO, "--include"]):
        with pytest.raises(SystemExit) as caught:
            run(*argv)
        assert caught.value.code == 2


def test_generate_from_a_repository(hub, capsys):
    assert main(["generate", "--model", REPO, "-m", "3", "-p", "the"]) == 0
    assert "Generation: 3 tokens" in capsys.readouterr().out
    assert main(["generate", "--model", "org/none", "-p", "x"]) == 1
    assert capsys.readouterr().err.startswith("mlx-moe: error: org/none: no such folder")


def test_as_a_user_sees_it(hub, tmp_path):
    """A process of its own, by the client's own settings, on a terminal of 80 columns."""
    name = "m" * 90
    hub.repos[REPO] |= {f"{name}.jinja": b""}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "COLUMNS": "80"}
    main_end, end = pty.openpty()
    code = "import sys; from mlx_moe.cli import main; sys.exit(main(['download', 'org/tiny']))"
    done = subprocess.Popen([sys.executable, "-c", code], stdout=end, stderr=subprocess.PIPE, env=environment)
    os.close(end)
    error = done.communicate(timeout=60)[1]
    assert done.returncode == 0, error
    lines = os.read(main_end, 1 << 16).decode().splitlines()
    os.close(main_end)
    assert lines[0].startswith("org/tiny at main") and lines[-1].startswith("Ready: ")
    assert all(len(line) <= 80 for line in lines[:-1]), lines
    assert not error, "no progress where nobody watches"
    assert any("…" in line for line in lines), "the long name"
    snapshot = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert json.loads((snapshot / "config.json").read_text())["model_type"]
