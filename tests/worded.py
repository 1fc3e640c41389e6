"""A checkpoint whose prompts may be text."""

from pathlib import Path

from test_text import TOKENIZER


def link_with_tokenizer(checkpoint: Path, model: Path) -> None:
    """Makes the folder `model`: the files of a checkpoint that has no tokenizer, and one."""
    model.mkdir()
    for entry in checkpoint.iterdir():
        (model / entry.name).symlink_to(entry)
    TOKENIZER.backend.save(str(model / "tokenizer.json"))
