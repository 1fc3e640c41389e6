"""Puts the figures of `bench.py kernels` into the tables of a document.

    python scripts/kernel_tables.py benchmarks/kernels-h200.json docs/kernels.md

A table stands between `<!-- figures: OP -->` and `<!-- end -->`; what is between them is replaced.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import tyro

_TABLE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_COLUMNS = ("case", "implementation", "buffers", "µs", "floor, µs", "times the floor", "kernels", "relative error")


def fill_tables(text: str, report: dict[str, Any]) -> str:
    """The document with the figures of a report in it."""
    return _TABLE.sub(lambda match: match[1] + markdown_table(report, match[2]) + match[3], text)


def markdown_table(report: dict[str, Any], op: str) -> str:
    """One row a program; nothing if the report has none of the operation."""
    rows = [row for row in report["rows"] if row["op"] == op]
    if not rows:
        return ""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *map(_cells, rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    bound = "bytes" if row["bytes_us"] >= row["operations_us"] else "operations"
    floor = f"{row['floor_us']:.1f} ({bound})"
    name = (row["case"], row["implementation"], row["buffers"])
    ratio, kernels = f"{row['us'] / row['floor_us']:.1f}", str(row["kernels"])
    return (*name, f"{row['us']:.1f}", floor, ratio, kernels, f"{row['rel_err']:.1e}")


def main(report: Path, document: Path, /) -> int:
    """Rewrites the document; returns the exit code: 0, or 2 if a file cannot be read or written.

    Args:
        report: what `bench.py kernels --json` wrote.
        document: Markdown with marked tables.
    """
    try:
        figures = json.loads(report.read_text(encoding="utf-8"))
        document.write_text(fill_tables(document.read_text(encoding="utf-8"), figures), encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {report} or {document}: {error}; give a report of bench.py kernels and a text.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
