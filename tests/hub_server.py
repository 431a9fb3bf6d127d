"""A local server that speaks as much of the Hub's API as huggingface_hub needs to list and fetch a model.

Large files (``.safetensors``, ``.gguf``) are LFS files: the Hub redirects to another host, which serves ranges. Every
request and every byte of content is counted, and connections can be cut.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
_PAGE = 5  # entries of a listing per answer
_PATH = re.compile(r"/(?:api/models/)?([^/]+/[^/]+)(?:/(revision|tree|resolve|cdn)/([^/]+)(?:/(.*))?)?")


class Hub:
    """Repositories by name, each a dict of path and contents; faults by path; and what was asked for.

    Attributes:
        gated: repositories that want terms accepted.
        cuts: path → for each answer in turn, after how many bytes the connection breaks.
        listed: path → a size to list that is not the file's.
        seen: (method, path, first byte) of every request for contents.
        served: path → bytes of content sent.
        commit: what every branch stands for.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.cuts: dict[str, list[int]] = defaultdict(list)
        self.listed: dict[str, int] = {}
        self.seen: list[tuple[str, str, int]] = []
        self.served: Counter[str] = Counter()
        self.commit = COMMIT
        self.url = ""

    @property
    def fetched(self) -> set[str]:
        """Paths of which content was sent."""
        return set(self.served)


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub at ``hub.url`` while the context lasts."""
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args: Any) -> None:
        """Clients that hang up are what the tests are about."""


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".gguf", ".bin"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or every answer waits 40 ms for an acknowledgement
    hub: Hub

    def log_message(self, *args: Any) -> None:
        """Nothing on standard error."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        url = urlsplit(self.path)
        match = _PATH.fullmatch(unquote(url.path))
        repo, what, revision, path = match.groups() if match else ("", None, None, None)
        if repo not in self.hub.repos:
            return self._refuse(401, "RepoNotFound")
        if repo in self.hub.gated and what in ("tree", "resolve"):
            return self._refuse(403, "GatedRepo")
        if revision not in (None, "main", "v1", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        files = self.hub.repos[repo]
        if what in (None, "revision"):
            return self._json({"id": repo, "sha": self.hub.commit, "siblings": [{"rfilename": name} for name in files]})
        if what == "tree":
            return self._tree(repo, files, int(parse_qs(url.query).get("cursor", ["0"])[0]))
        if path not in files:
            return self._refuse(404, "EntryNotFound")
        if what == "resolve" and _is_large(path):
            return self._redirect(repo, path, files[path])
        return self._content(path, files[path], body)

    def _json(self, value: Any, **headers: str) -> None:
        data = json.dumps(value).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers})
        self.wfile.write(data)

    def _tree(self, repo: str, files: dict[str, bytes], start: int) -> None:
        page = sorted(files)[start : start + _PAGE]
        entries = [self._entry(path, files[path]) for path in page]
        more = f'<{self.hub.url}/api/models/{repo}/tree/{COMMIT}?recursive=True&cursor={start + _PAGE}>; rel="next"'
        self._json(entries, **({"Link": more} if start + _PAGE < len(files) else {}))

    def _entry(self, path: str, data: bytes) -> dict[str, Any]:
        size = self.hub.listed.get(path, len(data))
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 130}
        return {"type": "file", "path": path, "size": size, "oid": _blob(data)} | (
            {"lfs": lfs} if _is_large(path) else {}
        )

    def _redirect(self, repo: str, path: str, data: bytes) -> None:
        sha = hashlib.sha256(data).hexdigest()
        place = f"{self.hub.url.replace('127.0.0.1', 'localhost')}/{repo}/cdn/{COMMIT}/{path}"
        self._head(302, {"Location": place, "X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha}"',
                         "X-Repo-Commit": COMMIT, "ETag": f'"{_blob(data)}"', "Content-Length": "0"})  # fmt: skip

    def _content(self, path: str, data: bytes, body: bool) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        part = data[start : int(asked[2]) + 1 if asked and asked[2] else None]
        self.hub.seen.append((self.command, path, start))
        ranged = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"} if asked else {}
        self._head(206 if asked else 200, {"Content-Length": str(len(part)), "ETag": f'"{_blob(data)}"',
                                           "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes", **ranged})  # fmt: skip
        if not body:
            return
        cut = self.hub.cuts[path].pop(0) if self.hub.cuts[path] else None
        self._send(path, part[:cut])
        self.close_connection = self.close_connection or cut is not None

    def _send(self, path: str, part: bytes) -> None:
        """In small pieces, so that a reader who leaves early is noticed."""
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(part), 1 << 16):
                piece = part[at : at + (1 << 16)]
                self.hub.served[path] += len(piece)
                self.wfile.write(piece)

    def _refuse(self, status: int, code: str) -> None:
        self._head(status, {"X-Error-Code": code, "X-Error-Message": code, "Content-Length": "0"})

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
