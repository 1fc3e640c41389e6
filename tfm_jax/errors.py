"""The one error that a user's input can cause."""


class TfmError(Exception):
    """Bad input: one sentence that says what is wrong, the value, and the way out.

    The command line prints the sentence and ends with exit code 2; nothing is half-written.
    """


def require(condition: bool, sentence: str) -> None:  # noqa: FBT001 - reads as a sentence itself
    """Raises `TfmError(sentence)` unless the condition holds."""
    if not condition:
        raise TfmError(sentence)
