"""Golden checkpoints read from their bytes, by a few lines that share nothing with `convert`."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).parent / "data" / "goldens"
HYBRID = GOLDENS / "qwen3_5_untied"
LOOP = GOLDENS / "tfm" / "loop_qwen3_5"
TRIO = {"target": HYBRID, "drafter": LOOP / "drafter", "weaver": LOOP / "weaver.pth"}


def read_safetensors(directory: Path) -> dict[str, np.ndarray]:
    """Tensors as float32 ([out, in]), from the bytes: 8-byte length, JSON header, values."""
    tensors = {}
    for file in directory.glob("*.safetensors"):
        content = file.read_bytes()
        start = 8 + struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:start])
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = (start + offset for offset in entry["data_offsets"])
                tensors[name] = widen(content[first:last], entry["dtype"]).reshape(entry["shape"])
    return tensors


def widen(content: bytes, dtype: str) -> np.ndarray:
    """bf16 is the upper half of a float32."""
    if dtype == "BF16":
        return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(content, "<f4")


def read_storages(file: Path) -> list[np.ndarray]:
    """Flat float32 storages of a .pth file, in the order in which its state_dict names them."""
    with zipfile.ZipFile(file) as archive:
        count = sum("/data/" in name for name in archive.namelist())
        return [np.frombuffer(archive.read(f"{file.stem}/data/{key}"), "<f4") for key in range(count)]


def array_files(directory: Path) -> dict[str, bytes]:
    """Every file but Orbax's own, which holds the time."""
    files = (file for file in directory.rglob("*") if file.is_file() and file.name != "_CHECKPOINT_METADATA")
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}
