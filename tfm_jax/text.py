"""Text to token ids and back, in one piece or as the ids come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from tfm_jax.errors import TfmError, require


class Tokenizer:
    """A `tokenizer.json` (Hugging Face `tokenizers`)."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Read `tokenizer.json`.

        Raises:
            TfmError: the file is missing or is no tokenizer.
        """
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises bare Exception for every fault of the file
            message = f"{path} is not a tokenizer ({error}); convert the checkpoint again."
            raise TfmError(message) from error

    def encode(self, text: str) -> list[int]:
        """Ids of raw text: no template, no begin or end token added. Special tokens spelled out in the text count.

        Raises:
            TfmError: the text holds half a surrogate pair, as Python makes of an argument that is no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"the prompt is not valid Unicode at character {error.start}; give UTF-8 text."
            raise TfmError(message) from error
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; special tokens are left out, bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        """A decoder for one sequence of ids as they come."""
        return TextStream(self)


class TextStream:
    """Incremental `Tokenizer.decode`: the pieces joined are the text, and no piece ends inside a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._length = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that these ids complete, perhaps none."""
        self._token_ids.extend(token_ids)
        piece = "".join(self._stream.step(self._tokenizer.backend, token_id) or "" for token_id in token_ids)
        self._length += len(piece)
        return piece

    def finish(self) -> str:
        """The rest, where the ids end inside a character."""
        return self._tokenizer.decode(self._token_ids)[self._length :]


class StopText:
    """Text of ids as they come, up to the first stop text, wherever in a piece it begins or ends.

    A text ends with the token that completes a stop text. Text that may be the beginning of one is held back until it
    is clear what follows.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stream = tokenizer.stream()
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """How many of these ids belong to the text, and what may be shown now; nothing after a stop."""
        shown = ""
        for index, token_id in enumerate(token_ids):
            if self.stopped:
                return index, shown
            self._held += self._stream.feed([token_id])
            starts = [start for stop in self._stops if (start := self._held.find(stop)) >= 0]
            self.stopped = bool(starts)
            clear = min(starts) if starts else len(self._held) - self._undecided()
            shown += self._held[:clear]
            self._held = "" if starts else self._held[clear:]
        return len(token_ids), shown

    def finish(self) -> str:
        """What was held back, where no stop text came."""
        return "" if self.stopped else self._held + self._stream.finish()

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        lengths = (
            size
            for stop in self._stops
            for size in range(min(len(stop) - 1, len(self._held)), 0, -1)
            if self._held.endswith(stop[:size])
        )
        return max(lengths, default=0)


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Check ids that a user gave.

    Raises:
        TfmError: there are none, or one is not in [0, vocab_size).
    """
    are_ids = not isinstance(token_ids, str) and isinstance(token_ids, Iterable)
    require(are_ids, f"a prompt is {token_ids!r:.40}; give a list of token ids for each, as `tokenizer.encode` makes.")
    require(len(token_ids) > 0, "the prompt is empty; give at least one token.")
    for index, token_id in enumerate(token_ids):
        is_whole = hasattr(token_id, "__index__")
        if not is_whole or not 0 <= token_id < vocab_size:
            wrong = "out of range" if is_whole else "no whole number"
            known = f"the model knows 0 to {vocab_size - 1}"
            message = f"token id {token_id!r:.40} at position {index} is {wrong}; {known}."
            raise TfmError(message)
