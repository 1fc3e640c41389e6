"""Sources by their id on the Hugging Face Hub: which files are wanted, where they lie, and where a directory came from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

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

_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]*\w)(?P<file>/[\w./-]+\.pth)?(@(?P<revision>[\w./-]+))?")
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(/|$)")


def resolve(source: str, patterns: Sequence[str], revision: str | None = None, *, quiet: bool = False) -> Path:
    """Local path of a source that is a path already or an id on the Hub, which is downloaded unless the cache has it.

    Args:
        source: a path, or `owner/name`, `owner/name/file.pth` for one file, either with `@revision` behind it.
        patterns: files to fetch of an id, `DIRECTORY_FILES` or `WEAVER_FILES`; the latter must fit one file.
        revision: commit, branch or tag; as if it were behind the id.
        quiet: draw no bars.

    Raises:
        TfmError: neither a path nor an id, or it cannot be downloaded; the sentence says what to fetch by hand.
    """
    match = None if Path(source).exists() else _ID.fullmatch(source)
    if match is None:
        if revision is not None:
            message = f"revision is {revision} but {source} is no id on the Hub; leave it out."
            raise TfmError(message)
        return Path(source)
    if revision is not None and match["revision"] not in (None, revision):
        message = f"revision is {revision} but {source} names another; leave one of them out."
        raise TfmError(message)
    wanted = [match["file"][1:]] if match["file"] else list(patterns)
    found = _download(source, match["name"], match["revision"] or revision, wanted, quiet=quiet)
    if patterns != WEAVER_FILES:
        return found
    files = sorted(found.rglob("*.pth"))
    if match["file"]:
        files = [file for file in files if file == found / wanted[0]]
    if len(files) != 1:
        names = ", ".join(str(file.relative_to(found)) for file in files[:5]) or "none"
        message = f"{source} must hold one .pth file to choose, not {names}; name it as {match['name']}/FILE.pth."
        raise TfmError(message)
    return files[0]


def name_source(path: Path) -> str:
    """What to record of a source: `owner/name@commit` in the Hub's cache, else the name of the file or directory."""
    match = _SNAPSHOT.search(path.absolute().as_posix())
    if match is None:
        return path.absolute().name if path.is_file() else path.resolve().name
    return f"{match['owner']}/{match['name']}@{match['commit']}"


def _download(source: str, name: str, revision: str | None, wanted: list[str], *, quiet: bool) -> Path:
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
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:  # the Hub's client reports by its own, httpx's and the system's types
        reason = next(iter(str(error).splitlines()), "")[:200]
        message = f"{source} is no path here and cannot be downloaded ({type(error).__name__}: {reason}); {by_hand}."
        raise TfmError(message) from error
