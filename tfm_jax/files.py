"""Text files that are whole or as they were."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """Writes a text of parts. A file keeps its old contents until all parts are there; a device or pipe has none.

    Args:
        path: file to make or to replace; a link stays one.
        parts: what comes one after the other; may raise whatever it likes.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            file.writelines(parts)
        return
    path = path.resolve()  # what a link points to
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.writelines(parts)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
