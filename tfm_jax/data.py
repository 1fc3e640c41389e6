"""Training data: text to token ids, and batches that are a pure function of (seed, step).

Because a batch depends on nothing else, a resumed run needs no iterator state, and the whole corpus (two bytes a token)
lives on the device, where the jitted step cuts its own batch. A data loader such as grain would have to save a position
and copy every batch from the host to end at the same place.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import lzma
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt, UInt16
from tokenizers import Tokenizer

from tfm_jax.errors import TfmError
from tfm_jax.state import pytree_dataclass

_ENCODED_AT_ONCE = 512  # documents: enough for every core, little memory


@dataclasses.dataclass(frozen=True)
class TokenisedText:
    """All documents of a file, one after the other, each ended by the end-of-text id.

    Attributes:
        tokens: token ids.
        starts: index in `tokens` of each document's first token, and the total as last entry.
        characters: Unicode characters of the text, separators not counted.
        sha256: hash of the text file and the tokenizer.
    """

    tokens: UInt16[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " documents_and_end"]
    characters: int
    sha256: str


@pytree_dataclass
class Continuations:
    """The target's own continuations of prompts, right-padded.

    Attributes:
        tokens: prompt and continuation.
        prompt_lengths: tokens of each prompt.
        lengths: tokens of each row, prompt included.
    """

    tokens: UInt[Array, "rows tokens"]
    prompt_lengths: Int[Array, " rows"]
    lengths: Int[Array, " rows"]


def read_documents(path: Path) -> Iterator[str]:
    """Texts of a `.jsonl` or `.jsonl.xz` file with one object with a `text` a line.

    Raises:
        TfmError: the file does not exist, or a line is not such an object.
    """
    if not path.is_file():
        message = f"no such text file: {path}; pass a .jsonl or .jsonl.xz file."
        raise TfmError(message)
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                message = f'{path}, line {number}, is not a JSON object with a "text"; write one document a line.'
                raise TfmError(message) from error


def tokenise(path: Path, tokenizer_path: Path, cache: Path, end_id: int = 0) -> TokenisedText:
    """Token ids of a text file; kept in `cache` under the hash of its inputs, so that a restart reads them back.

    Special tokens that occur in the text are encoded as ordinary text.

    Args:
        path: `.jsonl` or `.jsonl.xz`, one object with a `text` a line.
        tokenizer_path: `tokenizer.json`.
        cache: directory for the `.npz`.
        end_id: id that ends every document.

    Raises:
        TfmError: a file is missing, or the vocabulary does not fit two bytes.
    """
    if not tokenizer_path.is_file():
        message = f"no such tokenizer: {tokenizer_path}; train one with scripts/make_tokenizer.py."
        raise TfmError(message)
    sha256 = hash_files(path, tokenizer_path)
    cached = cache / f"tokens-{sha256[:16]}.npz"
    if not cached.exists():
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
        if tokenizer.get_vocab_size() > np.iinfo(np.uint16).max + 1:
            message = f"{tokenizer_path} has {tokenizer.get_vocab_size()} entries; training handles at most 65536."
            raise TfmError(message)
        tokenizer.encode_special_tokens = True
        save_arrays(cached, _encode(read_documents(path), tokenizer, end_id))
    with np.load(cached) as arrays:
        return TokenisedText(arrays["tokens"], arrays["starts"], int(arrays["characters"]), sha256)


def _encode(documents: Iterator[str], tokenizer: Tokenizer, end_id: int) -> dict[str, np.ndarray]:
    pieces, lengths, characters = [], [], 0
    for texts in _batched(documents, _ENCODED_AT_ONCE):
        characters += sum(map(len, texts))
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            pieces.append(np.asarray([*encoding.ids, end_id], np.uint16))
            lengths.append(len(pieces[-1]))
    return {
        "tokens": np.concatenate(pieces),
        "starts": np.concatenate([[0], np.cumsum(lengths)]),
        "characters": np.asarray(characters),
    }


def _batched(items: Iterator[str], size: int) -> Iterator[list[str]]:
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def hash_files(*paths: Path) -> str:
    """SHA-256 over the contents of files, in order.

    Raises:
        TfmError: a file is missing.
    """
    digest = hashlib.sha256()
    for path in paths:
        if not path.is_file():
            message = f"no such file: {path}."
            raise TfmError(message)
        digest.update(path.read_bytes())
    return digest.hexdigest()


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an `.npz` that is either whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        np.savez(file, allow_pickle=False, **arrays)
    Path(file.name).replace(path)


def load_continuations(path: Path) -> Continuations:
    """Reads what `scripts/sample_continuations.py` wrote.

    Raises:
        TfmError: the file is missing.
    """
    if not path.is_file():
        message = f"no continuations at {path}; sample them with scripts/sample_continuations.py."
        raise TfmError(message)
    with np.load(path) as arrays:
        return Continuations(*(jnp.asarray(arrays[name]) for name in ("tokens", "prompt_lengths", "lengths")))


def split_held_out(data: Continuations, held_out: int) -> tuple[Continuations, Continuations]:
    """All rows but the last `held_out`, and those.

    Raises:
        TfmError: nothing would be left to learn from.
    """
    rows = data.tokens.shape[0]
    if not 0 < held_out < rows:
        message = f"held_out is {held_out} of {rows} continuations; choose a number between 1 and {rows - 1}."
        raise TfmError(message)
    return jax.tree.map(lambda x: x[:-held_out], data), jax.tree.map(lambda x: x[-held_out:], data)


def take_rows(data: Continuations, rows: Int[Array, " batch"]) -> Continuations:
    """Some of the continuations."""
    return jax.tree.map(lambda x: x[rows], data)


def step_key(seed: int, step: Int[Array, ""]) -> Array:
    """The only source of randomness of a training step."""
    return jax.random.fold_in(jax.random.key(seed), step)


def shuffled_rows(seed: int, step: Int[Array, ""], rows: int, batch: int) -> Int[Array, " batch"]:
    """Rows of the batch of a step: every epoch visits a new permutation, and rows that fill no batch wait for the next.

    Args:
        seed: of the whole run.
        step: 0-based.
        rows: rows of the data set; at least `batch`.
        batch: rows a step.

    Raises:
        TfmError: there are fewer rows than a batch has.
    """
    if rows < batch:
        message = f"the data have {rows} rows, fewer than a batch of {batch}; use a smaller batch or more data."
        raise TfmError(message)
    steps_an_epoch = rows // batch
    epoch, place = step // steps_an_epoch, step % steps_an_epoch
    order = jax.random.permutation(jax.random.fold_in(jax.random.key(seed), epoch), rows)
    return jax.lax.dynamic_slice_in_dim(order, place * batch, batch)


def shuffled_windows(
    tokens: UInt16[Array, " tokens"], seed: int, step: Int[Array, ""], batch: int, length: int
) -> Int[Array, "batch window"]:
    """Windows of `length` + 1 tokens (the last is a label only): disjoint within an epoch, cut at new places in each.

    Args:
        tokens: packed corpus.
        seed: of the whole run.
        step: 0-based.
        batch: windows a step.
        length: tokens that the model reads.
    """
    windows = (tokens.shape[0] - 1 - length) // length
    starts = shuffled_rows(seed, step, windows, batch) * length
    epoch = step // (windows // batch)
    starts += jax.random.randint(jax.random.fold_in(step_key(seed, epoch), 1), (), 0, length)
    return tokens[starts[:, None] + jnp.arange(length + 1)].astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Right-padded prompts on the host."""

    tokens: UInt16[np.ndarray, "rows tokens"]
    lengths: Int[np.ndarray, " rows"]


def choose_prompts(text: TokenisedText, count: int, shortest: int, longest: int, seed: int) -> Prompts:
    """Prompts for continuations: pieces of documents, of random lengths.

    The first pass over the documents takes their beginnings, later passes a random place in each; documents shorter
    than `shortest` are left out.

    Args:
        text: corpus.
        count: prompts wanted.
        shortest: fewest tokens of a prompt.
        longest: most tokens of a prompt.
        seed: of the choice.

    Raises:
        TfmError: no document is long enough.
    """
    rng = np.random.default_rng(seed)
    sizes = np.diff(text.starts) - 1  # without the end-of-text id
    eligible = np.flatnonzero(sizes >= shortest)
    if not len(eligible):
        message = f"no document has {shortest} tokens or more; pass longer documents or a smaller shortest prompt."
        raise TfmError(message)
    passes = -(-count // len(eligible))
    documents = np.concatenate([rng.permutation(eligible) for _ in range(passes)])[:count]
    lengths = rng.integers(shortest, np.minimum(sizes[documents], longest), endpoint=True)
    places = rng.integers(0, sizes[documents] - lengths, endpoint=True)
    places[: len(eligible)] = 0
    tokens = np.zeros((count, longest), np.uint16)
    for row, start, length in zip(tokens, text.starts[documents] + places, lengths, strict=True):
        row[:length] = text.tokens[start : start + length]
    return Prompts(tokens, lengths.astype(np.int32))
