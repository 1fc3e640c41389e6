"""The one error that a user's input can cause."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Generator


class TfmError(Exception):
    """Bad input: one sentence that says what is wrong, the value, and the way out.

    The command line prints the sentence and ends with exit code 2; nothing is half-written.
    """


def require(condition: bool, sentence: str) -> None:  # noqa: FBT001 - reads as a sentence itself
    """Raises `TfmError(sentence)` unless the condition holds."""
    if not condition:
        raise TfmError(sentence)


@contextlib.contextmanager
def one_sentence(command: str) -> Generator[None]:
    """Makes the one error of what tyro says about mistaken options: a frame of several lines on stderr, then an exit.

    Args:
        command: whose --help to name.

    Raises:
        TfmError: the options were mistaken.
    """
    framed = io.StringIO()
    try:
        with contextlib.redirect_stderr(framed):
            yield
    except SystemExit as stop:
        if not stop.code:
            raise
        text = re.sub(r"\x1b\[[0-9;]*m", "", framed.getvalue())  # colours
        title, *paragraphs = re.split(r"(?m)^.*[─-]{10}.*$", text)  # between the frame's title and its first rule
        sentence = " ".join((paragraphs or [title])[0].replace("│", " ").split())
        message = f"{sentence.rstrip('.')}. See: {command} --help"
        raise TfmError(message) from None
