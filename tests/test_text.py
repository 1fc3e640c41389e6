"""Streaming gives the text of decoding at once, never half a character; bad ids and bad files are named."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from tfm_jax.errors import TfmError
from tfm_jax.text import Tokenizer, check_token_ids


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE: two specials, the 256 bytes, a few merges, some of them inside a character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=268,
        special_tokens=["<|endoftext|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["你好 🙂🙃 naïve"] * 3, trainer)
    return Tokenizer(backend)


TOKENIZER = byte_tokenizer()
IDS = st.lists(st.integers(0, TOKENIZER.backend.get_vocab_size() - 1), max_size=24)


@given(st.lists(IDS, max_size=6))
def test_streamed_pieces_join_to_the_text(pieces: list[list[int]]) -> None:
    stream = TOKENIZER.stream()
    shown = "".join(stream.feed(piece) for piece in pieces) + stream.finish()
    assert shown == TOKENIZER.decode([token for piece in pieces for token in piece])


@given(st.text(max_size=12))
def test_no_piece_ends_inside_a_character(text: str) -> None:
    stream = TOKENIZER.stream()
    pieces = [stream.feed([token]) for token in TOKENIZER.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    for end in range(len(pieces)):
        assert text.startswith("".join(pieces[:end]))


def test_a_cut_character_waits_for_its_last_byte() -> None:
    first, second, third = (TOKENIZER.backend.token_to_id(byte) for byte in "âĤ¬")  # the bytes E2 82 AC: €
    stream = TOKENIZER.stream()
    assert [stream.feed([first]), stream.feed([second]), stream.feed([third])] == ["", "", "€"]
    assert stream.finish() == ""
    cut = TOKENIZER.stream()
    assert cut.feed([first, second]) == ""
    assert cut.finish() == "�"


def test_encoding_adds_no_specials_and_knows_spelled_ones() -> None:
    assert TOKENIZER.encode("a<|mask|>") == [*TOKENIZER.encode("a"), 1]
    assert TOKENIZER.decode([0, *TOKENIZER.encode("a"), 1]) == "a"


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(TfmError, match="not valid Unicode"):
        TOKENIZER.encode("caf\udce9")  # what Python makes of a Latin-1 byte in an argument


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [([], "empty"), ([0, 8], "token id 8 at position 1 .* 0 to 7"), ([-1], "token id -1 at position 0")],
)
def test_ids_are_checked(token_ids: list[int], message: str) -> None:
    check_token_ids([0, 7], 8)
    with pytest.raises(TfmError, match=message):
        check_token_ids(token_ids, 8)


def test_files_that_are_no_tokenizer_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(TfmError, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)
    path.write_text('{"version": "1.0"}')
    with pytest.raises(TfmError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_file(path)
    TOKENIZER.backend.save(str(path))
    assert Tokenizer.from_file(path).encode("naïve 🙂") == TOKENIZER.encode("naïve 🙂")
