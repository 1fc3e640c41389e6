"""Train the demo's tokenizer: byte-level BPE with the pre-tokenizer of Qwen3.5 and the ChatML specials.

    python scripts/make_tokenizer.py corpus/train.jsonl.xz tokenizer.json

The same corpus gives the same file. About 15 s for 16,384 entries.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import tokenizers
import tyro
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

# tokenizer.json of the Qwen3.5 models: contractions, a word with at most one sign before it, single digits, signs,
# line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train on."""

    corpus: tyro.conf.Positional[Path]
    """train.jsonl.xz of build_corpus.py, or any .jsonl.xz with a `text` a line."""
    out: tyro.conf.Positional[Path]
    """tokenizer.json to write."""
    vocab_size: int = 16_384
    """Number of ids, bytes and specials included."""
    characters: float = 60e6
    """How much of the corpus to read."""


def read_texts(corpus: Path, characters: float) -> Iterator[str]:
    """Documents from the start of the corpus, the last one that fits included."""
    with lzma.open(corpus, "rt", encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            characters -= len(text)
            if characters < 0:
                return
            yield text


def train_tokenizer(options: Options) -> tokenizers.Tokenizer:
    """Train on the corpus; ids of the specials come first, then bytes, then merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_texts(options.corpus, options.characters), trainer)
    return tokenizer


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    trained = train_tokenizer(chosen)
    trained.save(str(chosen.out))
    print(f"{chosen.out}: {trained.get_vocab_size()} ids")
