"""Damages what a checkpoint brings, at random: `python tests/fuzz.py {headers,archives,pickles,configs} COUNT SEED`.

Prints how many inputs were refused, and by how many bytes the process's address space grew at its peak. Stops at any
error but the one type. A process of its own, so that nothing else counts and nothing is type-checked as it runs.
"""

from __future__ import annotations

import io
import json
import random
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sources import GOLDENS, LOOP

from convert.hf_config import parse_drafter, parse_target, parse_weaver
from convert.pth_io import PthReader
from convert.rules import map_weaver
from convert.safetensors_io import SafetensorsReader
from tfm_jax.errors import TfmError

DRAFTER = LOOP / "drafter" / "model.safetensors"
WEAVER = GOLDENS / "tfm" / "weaver_w1.pth"
HOSTILE = GOLDENS / "tfm" / "bad" / "malicious.pth"

_LONGEST_SENTENCE = 1000


def flip_bytes(rng: random.Random, content: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        content[rng.randrange(len(content))] = rng.randrange(256)


def remove_bytes(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(len(content))
    del content[start : start + rng.choice((1, 4, 100))]


def insert_bytes(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(len(content))
    content[start:start] = rng.randbytes(rng.choice((1, 4, 100)))


def repeat_bytes(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(len(content))
    content[start:start] = content[start : start + rng.choice((1, 8, 300))]


def change_digit(rng: random.Random, content: bytearray) -> None:
    digits = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    if digits:
        content[rng.choice(digits)] = rng.choice(b"0123456789")


def cut_off(rng: random.Random, content: bytearray) -> None:
    del content[rng.randrange(len(content)) :]


MUTATIONS: tuple[Callable[[random.Random, bytearray], None], ...] = (
    flip_bytes,
    remove_bytes,
    insert_bytes,
    repeat_bytes,
    change_digit,
    cut_off,
)
VALUES = (None, True, -1, 0, 1, 3, 1 << 40, 1 << 70, 0.5, 1e308, "", "x", [], [1], [[]], {}, {"x": 1}, ["a", None])


def mutate_values(rng: random.Random, value: Any) -> Any:  # noqa: ANN401  (a JSON value)
    """The same JSON with one value, anywhere inside, replaced, removed or taken from elsewhere."""
    places = []

    def collect(container: Any) -> None:  # noqa: ANN401  (a JSON value)
        pairs = container.items() if isinstance(container, dict) else enumerate(container)
        for key, inner in pairs:
            places.append((container, key))
            if isinstance(inner, dict | list):
                collect(inner)

    collect(value)
    container, key = rng.choice(places)
    if rng.random() < 0.2:
        del container[key]
    elif rng.random() < 0.2:
        other, place = rng.choice(places)
        container[key] = json.loads(json.dumps(other[place] if place in other or isinstance(other, list) else None))
    else:
        container[key] = rng.choice(VALUES)
    return value


def survives(read: Callable[[], object]) -> bool:
    """Whether something reads; any error but the one type, or a sentence that is no line, ends the run."""
    try:
        read()
    except TfmError as error:
        sentence = str(error)
        if not sentence.isprintable() or len(sentence) > _LONGEST_SENTENCE:
            message = f"no line to show people: {sentence!r}"
            raise ValueError(message) from error
        return False
    return True


def damage(rng: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    rng.choice(MUTATIONS)(rng, damaged)
    return bytes(damaged)


def read_all(directory: Path) -> None:
    reader = SafetensorsReader(directory)
    for name in reader.tensors:
        reader.read(name)


def read_weaver(file: Path) -> None:
    reader = PthReader(file)
    config = parse_weaver(reader.values, reader.tensors.keys(), str(file))
    model = map_weaver(reader, config, str(file))
    for path in model.rules:
        model.make_parameter(path)


def damage_headers(rng: random.Random, directory: Path) -> Iterator[Callable[[], object]]:
    """A third with a length that may be wrong; in the others the damage gets past it to the checks behind."""
    whole = DRAFTER.read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    header, values = whole[8:start], whole[start:]
    while True:
        kind = rng.randrange(3)
        if kind == 0:
            damaged = damage(rng, whole[:start])
        else:
            changed = damage(rng, header) if kind == 1 else json.dumps(mutate_values(rng, json.loads(header))).encode()
            damaged = struct.pack("<Q", len(changed)) + changed
        (directory / "model.safetensors").write_bytes(damaged + values)
        yield lambda: read_all(directory)


def damage_archives(rng: random.Random, directory: Path) -> Iterator[Callable[[], object]]:
    """Half of the damage goes to the list of entries at the end."""
    file, whole = directory / "x.pth", WEAVER.read_bytes()
    entries = whole.index(b"PK\x01\x02")
    while True:
        first = rng.choice((0, entries))
        file.write_bytes(whole[:first] + damage(rng, whole[first:]))
        yield lambda: read_weaver(file)


def damage_pickles(rng: random.Random, directory: Path) -> Iterator[Callable[[], object]]:
    """The checksums are right here, so that the damage reaches the interpreter."""
    file, prepared = directory / "x.pth", []
    for source in (WEAVER, HOSTILE):
        buffer = io.BytesIO()
        with zipfile.ZipFile(source) as archive, zipfile.ZipFile(buffer, "w") as rest:
            entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
            pickled = entries.pop("data.pkl")
            for name, content in entries.items():
                rest.writestr(f"w/{name}", content)
        prepared.append((pickled, buffer.getvalue()))
    while True:
        pickled, rest = rng.choice(prepared)
        file.write_bytes(rest)
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("w/data.pkl", damage(rng, pickled))
        yield lambda: read_weaver(file)


def damage_configs(rng: random.Random, _: Path) -> Iterator[Callable[[], object]]:
    names = ("qwen3_5_untied", "qwen3_5_vl_tied", "qwen3_untied", "qwen3_next", "qwen3_5_moe")
    targets = [(GOLDENS / name / "config.json").read_text() for name in names]
    names = ("dflash_on_qwen3_5_untied", "dflash_swa_on_qwen3_5_untied", "tfm/loop_qwen3_5/drafter")
    drafters = [(GOLDENS / name / "config.json").read_text() for name in names]
    while True:
        target, drafter = (mutate_values(rng, json.loads(rng.choice(texts))) for texts in (targets, drafters))
        yield lambda values=target: parse_target(values, "c", has_head=rng.random() < 0.5)
        yield lambda values=drafter: parse_drafter(values, "c", target_layers=8)


KINDS = {"headers": damage_headers, "archives": damage_archives, "pickles": damage_pickles, "configs": damage_configs}


def peak() -> int:
    """Largest address space so far, in bytes; unlike resident pages it counts what is allocated and not touched."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmPeak:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    kind, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as directory:
        inputs = KINDS[kind](random.Random(seed), Path(directory))  # noqa: S311  (no secret)
        for _ in range(50):
            survives(next(inputs))
        before = peak()
        refused = sum(not survives(next(inputs)) for _ in range(count))
        sys.stdout.write(json.dumps({"refused": refused, "grown": peak() - before}) + "\n")


if __name__ == "__main__":
    main()
