"""Sources by their id on the Hugging Face Hub: which files are wanted, and where they lie."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tfm_jax.errors import TfmError

# Nothing else is downloaded: no code, no pickle but the Weaver's own, no second format of the same weights.
DIRECTORY_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
    "*.safetensors",
)
WEAVER_FILES = ("*.pth",)

_ID = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]*(?<!\.pth))(/(?P<file>[\w-][\w./-]*\.pth))?(@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
_SNAPSHOT = re.compile(
    r"/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(/(?P<file>.+))?$"
)


class Resolved(NamedTuple):
    """A local path, and the commit where it lies in the Hub's cache."""

    path: Path
    revision: str | None


def resolve(
    source: str, revision: str | None = None, patterns: Sequence[str] = DIRECTORY_FILES, *, quiet: bool = False
) -> Resolved:
    """Local path of a source: a path already, or an id on the Hub, which is downloaded unless the cache has it.

    Args:
        source: a path, or `owner/name`, or `owner/name/file.pth` for one file; an id may end in `@revision`.
        revision: commit, branch or tag; the same as behind the id.
        patterns: files to fetch of an id, `DIRECTORY_FILES` or `WEAVER_FILES`; of the latter there must be one.
        quiet: draw no bars.

    Raises:
        TfmError: a revision of a path, or an id that cannot be downloaded; the sentence says what to fetch by hand.
    """
    match = None if Path(source).exists() else _ID.fullmatch(source)
    if match is None:
        if revision is not None:
            message = f"revision is {revision} but {source} is no id on the Hub; leave it out."
            raise TfmError(message)
        return Resolved(Path(source), _find_commit(Path(source)))
    if revision is not None and match["revision"] not in (None, revision):
        message = f"revision is {revision} but {source} names another; leave one of them out."
        raise TfmError(message)
    file = match["file"]
    found = _download(source, match["name"], match["revision"] or revision, [file] if file else patterns, quiet=quiet)
    if patterns == WEAVER_FILES:
        found = found / file if file else _only_weaver(found, match["name"])
    return Resolved(found, _find_commit(found))


def name_source(path: Path) -> str:
    """What to call a source: its id where it lies in the Hub's cache, else the name of the file or directory."""
    match = _SNAPSHOT.search(path.absolute().as_posix())
    if match is None:
        return path.name if path.is_file() else path.resolve().name
    return "/".join([match["owner"], match["name"], *filter(None, [match["file"]])])


def _find_commit(path: Path) -> str | None:
    match = _SNAPSHOT.search(path.absolute().as_posix())
    return match["commit"] if match else None


def _only_weaver(directory: Path, name: str) -> Path:
    files = sorted(directory.rglob("*.pth"))
    if len(files) != 1:
        names = ", ".join(str(file.relative_to(directory)) for file in files[:5]) or "none"
        message = f"{name} holds {len(files)} .pth files ({names}); choose one as {name}/FILE.pth."
        raise TfmError(message)
    return files[0]


def _download(source: str, name: str, revision: str | None, wanted: Sequence[str], *, quiet: bool) -> Path:
    files = ", ".join(wanted)
    by_hand = f"download {files} of https://huggingface.co/{name} by hand and give the path"
    try:
        from huggingface_hub import snapshot_download, utils
    except ImportError as error:
        message = f"{source} is no path here, and the Hub needs the extra tfm-jax[hub]; install it, or {by_hand}."
        raise TfmError(message) from error
    if quiet:
        utils.disable_progress_bars()
    try:
        nested = [] if wanted != DIRECTORY_FILES else ["*/*"]  # other formats of the same weights lie in folders
        found = snapshot_download(name, revision=revision, allow_patterns=list(wanted), ignore_patterns=nested)
    except Exception as error:  # the Hub's client reports by its own, httpx's and the system's types
        reason = next(iter(str(error).splitlines()), "")[:200]
        message = f"{source} is no path here and cannot be downloaded ({type(error).__name__}: {reason}); {by_hand}."
        raise TfmError(message) from error
    return Path(found)
