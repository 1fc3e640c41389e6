"""Puts the figures of `bench.py kernels` into the tables of a document.

    python scripts/kernel_tables.py benchmarks/kernels-h200.json docs/kernels.md

A table stands between `<!-- figures: OP -->` and `<!-- end -->`; what is between them is replaced. Tables of operations
that the report does not have stay as they are.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import tyro

from tfm_jax.files import write_whole

_TABLE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_COLUMNS = ("case", "implementation", "buffers", "µs", "floor, µs", "times the floor", "kernels", "relative error")


def fill_tables(text: str, report: dict[str, Any]) -> str:
    """The document with the figures of a report in it.

    Raises:
        ValueError: none of its tables is for an operation of the report.
    """
    known = {row["op"] for row in report["rows"]}
    if not known & {match[2] for match in _TABLE.finditer(text)}:
        message = f"the document has no table of {', '.join(sorted(known)) or 'anything'} in the report"
        raise ValueError(message)

    def fill(table: re.Match[str]) -> str:
        head, op, end = table.groups()
        return head + markdown_table(report, op) + end if op in known else table[0]

    return _TABLE.sub(fill, text)


def markdown_table(report: dict[str, Any], op: str) -> str:
    """One row a program."""
    rows = [row for row in report["rows"] if row["op"] == op]
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
        write_whole(document, [fill_tables(document.read_text(encoding="utf-8"), figures)])
    except (OSError, ValueError) as error:
        sentence = f"{report} or {document}: {error}; give a report of bench.py kernels and a text with marked tables."
    except (ArithmeticError, LookupError, RecursionError, TypeError) as error:
        sentence = f"{report} is no report of bench.py kernels ({type(error).__name__}: {error}); make one with --json."
    else:
        return 0
    print(f"error: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
