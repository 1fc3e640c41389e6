"""The prompts of the benchmarks: documents held out from training, and sets of prompts in files."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tfm_jax.errors import TfmError
from tfm_jax.text import Tokenizer

DOCUMENTS, PREFIX = 64, 128  # held-out documents, and tokens of each that are its prompt
PROMPT_SETS = ("humaneval", "verilogeval")

type PromptSets = dict[str, list[list[int]]]


def list_files(held_out: Path | None, prompts: Path | None) -> dict[str, Path]:
    """The file of each prompt set that was asked for.

    Raises:
        TfmError: none was.
    """
    files = {} if held_out is None else {"val": held_out}
    if prompts is not None:
        files |= {name: prompts / f"{name}.jsonl" for name in PROMPT_SETS}
    if not files:
        message = "there is nothing to measure on; give --held-out FILE, --prompts DIR or both."
        raise TfmError(message)
    return files


def read_texts(files: dict[str, Path]) -> dict[str, list[str]]:
    """Texts of the prompts of each set.

    Raises:
        TfmError: a file is missing or malformed.
    """
    texts = {}
    for name, path in files.items():
        if name == "val":
            documents = read_objects(path, {"id", "text"})
            words = [[document["id"], document["text"]] for document in documents]
            _check_texts(path, words, "a text as id and one as text")
            texts[name] = [document["text"] for document in choose_documents(documents)]
        else:
            turns = [entry["turns"] for entry in read_objects(path, {"turns"})]
            _check_texts(path, turns, "a list of texts as turns")
            texts[name] = [first for first, *_ in turns]
    return texts


def _check_texts(path: Path, lines: list[Any], expected: str) -> None:
    for number, words in enumerate(lines, 1):
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            message = f"{path}, line {number}, has {words!r:.60}; write {expected}."
            raise TfmError(message)


def read_objects(path: Path, keys: set[str]) -> list[dict[str, Any]]:
    """The objects of a `.jsonl` or `.jsonl.xz` file, one a line.

    Args:
        path: the file.
        keys: what every object must have.

    Raises:
        TfmError: the file is missing or empty, or a line is not such an object.
    """
    if not path.is_file():
        message = f"no such file: {path}; pass a .jsonl or .jsonl.xz file."
        raise TfmError(message)
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            lines = file.readlines()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        message = f"{path} cannot be read ({error}); pass UTF-8 text, an object a line, as it is or packed by xz."
        raise TfmError(message) from error
    objects = []
    for number, line in enumerate(lines, 1):
        try:
            objects.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            message = f"{path}, line {number}, is not JSON ({error}); write an object a line."
            raise TfmError(message) from error
        if not isinstance(objects[-1], dict) or not keys <= objects[-1].keys():
            message = f"{path}, line {number}, is not an object with {sorted(keys)}; write one a line."
            raise TfmError(message)
    if not objects:
        message = f"{path} is empty; write an object a line."
        raise TfmError(message)
    return objects


def choose_documents(documents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first documents in the order of sha1(id): a choice that nobody made."""

    def order(document: dict[str, Any]) -> str:
        return hashlib.sha1(document["id"].encode(), usedforsecurity=False).hexdigest()

    return sorted(documents, key=order)[:DOCUMENTS]


def encode_prompts(
    texts: dict[str, list[str]], tokenizer: Tokenizer | None, positions: int, new_tokens: int
) -> PromptSets:
    """Token ids of the prompts of each set.

    Args:
        texts: of each set.
        tokenizer: of the checkpoint.
        positions: of the model, for prompt and new tokens.
        new_tokens: that will follow.

    Raises:
        TfmError: there is no tokenizer, or no room for a prompt and the new tokens.
    """
    if tokenizer is None:
        message = "this checkpoint has no tokenizer.json, and the prompts are text; convert one that has it."
        raise TfmError(message)
    room = positions - new_tokens
    if room < 1:
        message = f"max_new_tokens is {new_tokens} and the model has {positions} positions; ask for fewer."
        raise TfmError(message)
    longest = {"val": min(PREFIX, room)}
    return {
        name: [tokenizer.encode(text)[: longest.get(name, room)] for text in members] for name, members in texts.items()
    }
