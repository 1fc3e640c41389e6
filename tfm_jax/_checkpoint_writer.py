"""Writes converted checkpoints so that a run which is killed can be continued.

    OUT.partial/journal.jsonl       what is being written; then a line for every finished piece
    OUT.partial/target/layers.0     a finished piece
    OUT.partial/target/layers.1.tmp the piece at hand

A piece is finished once its files are on the disk (fsync), it has got its name by a rename, and the journal says so, in
this order. In the end the journal goes, config.json comes, and OUT.partial becomes OUT, in this order: whatever lacks a
piece has no config.json and does not load.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from tfm_jax._checkpoint_config import CONFIG_FILE, TOKENIZER_FILE, CheckpointConfig, Dtype, expected_pieces
from tfm_jax._checkpoint_files import ArrayWriter, read_piece, sync, sync_tree, write_tree
from tfm_jax._checkpoint_layout import Shape, check_shapes, stored_dtype
from tfm_jax.errors import TfmError

_JOURNAL, _UNFINISHED = "journal.jsonl", ".tmp"
_OURS = {"target", "drafter", "weaver", TOKENIZER_FILE, CONFIG_FILE, _JOURNAL}

Note = Mapping[str, int]


class CheckpointWriter:
    """Writes an OUT piece by piece; what is left to write is in `missing`, the rest was finished by an earlier run.

    Leaving the `with` block without `finish` removes what was written; with an `origin`, finished pieces stay for a
    later run after Ctrl-C or a full disk, and of course where the process is killed.

    Args:
        out: directory to create; empty or absent.
        config: what the checkpoint will hold; `expected_pieces(config)` lists the pieces to write.
        dtype: dtype to store, the recurrence's arrays excepted; None keeps each array's own.
        origin: identifies the sources and options; a later run continues only where it is the same. Empty: never.

    Attributes:
        finished: pieces that are written, with the notes that came with them.

    Raises:
        TfmError: `out` or its sibling `OUT.partial` is in the way, or another process is writing there.
    """

    def __init__(
        self, out: str | Path, config: CheckpointConfig, *, dtype: Dtype | None = None, origin: str = ""
    ) -> None:
        self._out = Path(out).resolve()
        self._partial = _partial(out)
        self._config = config
        self._dtype = dtype
        self._origin = origin
        self._pieces = expected_pieces(config)
        self._journal: IO[str] | None = None
        self._lock: int | None = None  # descriptor of OUT.partial; what lies there is ours as long as we have it
        self._arrays = ArrayWriter()
        self._keep = self._done = False
        self.finished: dict[str, Note] = {}
        check_free(out)
        with self._disk_errors():
            if self._partial.exists():
                self._own_partial()
                if origin and (self._partial / _JOURNAL).is_file():
                    self.finished = finished_pieces(out, config, origin)
                if not self.finished:
                    _empty(self._partial)
        self._sealer = concurrent.futures.ThreadPoolExecutor(1)
        self._sealing: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> CheckpointWriter:  # noqa: PYI034  (beartype cannot check Self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._sealer.shutdown()
        if self._journal is not None:
            self._journal.close()
        if self._lock is None:
            return
        interrupted = kind is not None and not issubclass(kind, Exception)
        kept = self.finished and self._origin and (self._keep or interrupted)
        if not self._done:
            for remains in self._partial.rglob(f"*{_UNFINISHED}") if kept else [self._partial]:
                shutil.rmtree(remains, ignore_errors=True)
        os.close(self._lock)

    @property
    def missing(self) -> dict[str, dict[str, Shape]]:
        """Pieces still to be written, as `expected_pieces`."""
        return {name: shapes for name, shapes in self._pieces.items() if name not in self.finished}

    def write_piece(self, name: str, arrays: Mapping[str, np.ndarray | jax.Array]) -> None:
        """Write one of the missing pieces from whole arrays by dotted path, such as `mixer.qkv.kernel`.

        Raises:
            TfmError: as `write_blocks`.
        """
        check_shapes(name, {path: array.shape for path, array in arrays.items()}, self.missing.get(name, {}))
        self.write_blocks(name, ((path, np.asarray(array)) for path, array in arrays.items()))

    def write_blocks(self, name: str, blocks: Iterable[tuple[str, np.ndarray]], note: Note | None = None) -> None:
        """Write one of the missing pieces from parts of its arrays.

        Args:
            name: such as `target/layers.0`.
            blocks: dotted paths, such as `mixer.qkv.kernel`, with consecutive parts along the array's first axis;
                array after array.
            note: numbers to find again in `finished`; read after the last block.

        Raises:
            TfmError: an array is missing, superfluous or misshapen, or the disk refuses.
        """
        expected, found = self.missing.get(name, {}), {}
        draft = self._partial / (name + _UNFINISHED)
        with self._disk_errors():
            if self._journal is None:
                self._open_journal()
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            rest = iter(blocks)
            following = next(rest, None)
            while following is not None:
                array = _Parts(following, rest)
                shape = expected.get(array.path, array.shape)
                self._arrays.write(draft / array.path, shape, stored_dtype(array.path, array.dtype, self._dtype), array)
                found[array.path] = array.shape
                following = array.following
            check_shapes(name, found, expected)
            write_tree(draft, found)
            self._wait()
            self._sealing = self._sealer.submit(self._seal, name, dict(note or {}))

    def copy_tokenizer(self, source: Path) -> None:
        """Copy a tokenizer.json into OUT."""
        with self._disk_errors():
            shutil.copyfile(source, self._partial / TOKENIZER_FILE)
            sync(self._partial / TOKENIZER_FILE)

    def finish(self) -> None:
        """Write config.json and give OUT its name.

        Raises:
            TfmError: a piece has not been written, or the disk refuses.
        """
        text = json.dumps(self._config.to_dict(), indent=2, ensure_ascii=False) + "\n"
        with self._disk_errors():
            self._wait()
            if self.missing:
                message = f"{self._out} is incomplete: the pieces {sorted(self.missing)} were not written."
                raise TfmError(message)
            draft = self._partial / (CONFIG_FILE + _UNFINISHED)
            draft.write_text(text, encoding="utf-8")
            sync(draft)
            (self._partial / _JOURNAL).unlink()
            draft.replace(self._partial / CONFIG_FILE)
            sync(self._partial)
            self._partial.replace(self._out)
            self._done = True
            sync(self._out.parent)

    def _seal(self, name: str, note: Note) -> None:
        """Give a written piece its name; runs beside the writing of the next one, since the disk takes its time."""
        draft, piece = self._partial / (name + _UNFINISHED), self._partial / name
        sync_tree(draft)
        shutil.rmtree(piece, ignore_errors=True)  # one that a killed run named but did not note
        draft.replace(piece)
        sync(piece.parent)
        self._note({"piece": name, "note": note})
        self.finished[name] = note

    def _wait(self) -> None:
        if self._sealing is not None:
            self._sealing.result()

    def _own_partial(self) -> None:
        """Makes OUT.partial if it is missing, and locks it for this writer.

        The lock is on the directory itself: it stays with it when it gets its last name, and one that its owner has
        removed in the meantime is told by its number.
        """
        while self._lock is None:
            self._partial.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                lock = os.open(self._partial, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.path.samestat(os.fstat(lock), self._partial.stat()):
                        self._lock = lock
                except BlockingIOError as error:
                    message = (
                        f"{self._partial} is being written by another process; let it finish or choose another OUT."
                    )
                    raise TfmError(message) from error
                finally:
                    if self._lock is None:
                        os.close(lock)

    def _open_journal(self) -> None:
        self._own_partial()
        file = self._partial / _JOURNAL
        new = not file.is_file()
        self._journal = file.open("a", encoding="utf-8")
        if new:
            self._note({"origin": self._origin})

    def _note(self, line: dict[str, Any]) -> None:
        if self._journal is not None:
            self._journal.write("\n" + json.dumps(line))  # the break first: a line that a kill cut short ends there
            self._journal.flush()
            sync(self._partial / _JOURNAL)

    @contextlib.contextmanager
    def _disk_errors(self) -> Generator[None, None, None]:
        """Turn what a full or read-only disk raises into the one error type."""
        try:
            yield
        except OSError as error:
            self._keep = bool(self._origin)
            kept = self._keep and self.finished
            rest = (
                f"the finished pieces are kept in {self._partial.name}, repeat to continue"
                if kept
                else "nothing was left"
            )
            message = f"{self._out} cannot be written ({error.strerror or error}); {rest}."
            raise TfmError(message) from error


def check_free(out: str | Path) -> None:
    """Check that OUT can be created.

    Raises:
        TfmError: it exists and is not an empty directory, or its sibling `OUT.partial` is something else.
    """
    path = Path(out).resolve()
    if path.exists() and (not path.is_dir() or path.is_mount() or any(path.iterdir())):
        message = f"{out} exists and is not an empty directory that can be replaced; choose another."
        raise TfmError(message)
    partial = _partial(out)
    if not partial.exists():
        return
    if not partial.is_dir() or {entry.name.removesuffix(_UNFINISHED) for entry in partial.iterdir()} - _OURS:
        message = f"{partial} is in the way and was not left by an earlier run; remove it."
        raise TfmError(message)


def finished_pieces(out: str | Path, config: CheckpointConfig, origin: str) -> dict[str, Note]:
    """Pieces that an earlier run of the same origin finished, with their notes; each is looked at again."""
    partial, pieces = _partial(out), expected_pieces(config)
    try:
        lines = [_parse(line) for line in (partial / _JOURNAL).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return {}
    if {"origin": origin} not in lines:
        return {}
    return {
        line["piece"]: line["note"]
        for line in lines
        if (shapes := pieces.get(line.get("piece", ""))) and _is_whole(partial / line["piece"], shapes)
    }


def _parse(line: str) -> dict[str, Any]:
    """A line of the journal; empty where a kill cut it short."""
    try:
        return json.loads(line)
    except ValueError:
        return {}


def _is_whole(piece: Path, shapes: Mapping[str, Shape]) -> bool:
    try:
        return {path: array.shape for path, array in read_piece(piece).items()} == shapes
    except (TfmError, OSError, ValueError, LookupError, TypeError):
        return False


def _partial(out: str | Path) -> Path:
    path = Path(out).resolve()
    return path.with_name(path.name + ".partial")


class _Parts:
    """The parts of one array out of a stream of blocks; `shape` is right, and `following` known, after the last."""

    def __init__(self, first: tuple[str, np.ndarray], rest: Iterator[tuple[str, np.ndarray]]) -> None:
        self.path, block = first
        self.dtype, self.shape = block.dtype, (0, *block.shape[1:])
        self.following: tuple[str, np.ndarray] | None = first
        self._rest = rest

    def __iter__(self) -> Iterator[np.ndarray]:
        while self.following is not None and self.following[0] == self.path:
            block = self.following[1]
            self.shape = (self.shape[0] + len(block), *self.shape[1:])
            yield block
            self.following = next(self._rest, None)


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
