"""`bench.py kernels`: every operation in every implementation, checked against an oracle, then timed beside its floor.

A floor is the larger of two times: the bytes that cannot be left out at the rate of a large copy, and the arithmetic at
the rate of a large bfloat16 product, both measured in the same run. `own` calls all layers in turn, each with its own
buffers, which therefore come from device memory; `hot` calls one layer again and again.

Layers of a round have one tree in common, and what they derive from it alone (words of bits, a mask in another type)
XLA computes once for all layers of a program. A program of one layer computes it too, so that it is timed apart:
`layer_us` is a layer with the tree known to the compiler, `shared_us` what a layer that is given the tree takes beyond
that, and `us` is layer_us + shared_us / layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import tyro
from _bench_report import show_kernels
from _kernel_cases import attention_workloads, conv_workloads, gdn_chunk_workloads, gdn_tree_workloads
from _kernel_cases_model import commit_workloads, top_k_workloads, weaver_workloads
from _kernel_timing import Ceilings, Layers, Program, measure_ceilings, time_program
from _kernel_workload import QWEN_27B, SMALL, Shapes, Workload, with_known

from tfm_jax.errors import TfmError

Op = Literal["gdn_tree_verify", "tree_conv", "tree_attention", "commit", "top_k", "weaver_tree", "gdn_chunk"]
Form = Literal["mosaic", "triton", "xla", "fla-core"]
_WORKLOADS: dict[str, Callable[[Shapes, str], Iterator[Workload]]] = {
    "gdn_tree_verify": gdn_tree_workloads,
    "tree_conv": conv_workloads,
    "tree_attention": attention_workloads,
    "commit": commit_workloads,
    "top_k": top_k_workloads,
    "weaver_tree": weaver_workloads,
    "gdn_chunk": gdn_chunk_workloads,
}


type _Program = Callable[[Layers], list[Any]]
type _Figures = dict[str, dict[str, float]]  # by kind of buffers


class _Form(NamedTuple):
    """Programs of a form: a layer, and, if there are operands that layers share, a layer that knows them already."""

    whole: _Program
    rest: _Program | None


class _Failure(NamedTuple):
    kind: Literal["unsupported", "failed"]
    reason: str


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Time every kernel at the shapes of Qwen3.6-27B, batch 1.

    Attributes:
        output: JSON file to write.
        ops: operations to time.
        implementations: forms to time; one that an operation does not have is left out. fla-core is no form but a
            public kernel to compare `gdn_chunk` with, if it is installed.
        precision: of the operations that have the choice.
        repeats: timed runs through all layers, of which the median counts.
        small: tiny shapes, also on a CPU, to see that everything runs; the times mean nothing.
    """

    output: Annotated[Path | None, tyro.conf.arg(aliases=["--json"])] = None
    ops: tuple[Op, ...] = (
        "gdn_tree_verify",
        "tree_conv",
        "tree_attention",
        "commit",
        "top_k",
        "weaver_tree",
        "gdn_chunk",
    )
    implementations: tuple[Form, ...] = ("mosaic", "triton", "xla", "fla-core")
    precision: Literal["default", "highest"] = "default"
    repeats: int = 20
    small: bool = False

    def measure(self) -> dict[str, Any]:
        """The report: `meta`, `rows`, and what was not timed.

        Raises:
            TfmError: full size without a GPU, or nothing to repeat.
        """
        if jax.default_backend() != "gpu" and not self.small:
            message = f"kernels are timed on a GPU and this is a {jax.default_backend().upper()}; try --small."
            raise TfmError(message)
        if self.repeats < 1:
            message = f"--repeats is {self.repeats}; use at least 1."
            raise TfmError(message)
        ceilings = measure_ceilings(small=self.small)
        report: dict[str, Any] = {"meta": self._meta(ceilings), "rows": [], "unsupported": [], "failed": []}
        shapes = SMALL if self.small else QWEN_27B
        workloads = [workload for op in dict.fromkeys(self.ops) for workload in _WORKLOADS[op](shapes, self.precision)]
        # Compilers take most of the time. All compile side by side, and nothing is timed while one may try kernels.
        with ThreadPoolExecutor() as pool:
            programs = [self._programs(workload, pool) for workload in workloads]
            print(f"compiling the programs of {len(workloads)} cases", file=sys.stderr, flush=True)
        for workload, forms in zip(workloads, programs, strict=True):
            for kind, entry in _measure(workload, forms, ceilings, self.repeats):
                report[kind].append(entry)
                print(_progress(kind, entry), file=sys.stderr, flush=True)
        return report

    def show(self, report: dict[str, Any]) -> None:
        """Prints the table."""
        show_kernels(report)

    def plot(self, _: dict[str, Any], __: Path) -> None:
        """The table says it all."""

    def failure(self, report: dict[str, Any]) -> str | None:
        """Whatever raised an error or gave a wrong result."""
        if not report["failed"]:
            return None
        return f"{len(report['failed'])} implementations failed; see the last lines of the table."

    def _programs(self, workload: Workload, pool: Executor) -> dict[str, _Form | _Failure]:
        """A program for every form that is asked for, or why there is none."""
        forms = [form for form in (*workload.forms, *workload.foreign) if form in self.implementations]
        shapes = jax.eval_shape(lambda: workload.operands(0)) if forms else ()
        programs: dict[str, _Form | _Failure] = {}
        for form in forms:
            try:
                if form in workload.foreign:
                    programs[form] = _Form(workload.foreign[form](), None)
                else:
                    run = workload.run(form, self.precision)
                    whole = Program(run, shapes, pool, donates=workload.donates)
                    rest = Program(with_known(run, workload.shared), shapes, pool) if workload.shared else None
                    programs[form] = _Form(whole, rest)
            except Exception as error:  # noqa: BLE001 - whatever a compiler raises: the other forms still run
                programs[form] = _Failure("unsupported" if _is_refusal(error) else "failed", _first_line(error))
        return programs

    def _meta(self, ceilings: Ceilings) -> dict[str, Any]:
        return {
            "precision": self.precision,
            "compilers": dict(_installed("triton", "jax-triton", "torch", "fla-core")),
            "timer": "CUPTI, sum of kernel times" if jax.default_backend() == "gpu" else "clock of a CPU",
            "copy_bytes_per_second": ceilings.copy,
            "matmul_operations_per_second": ceilings.matmul,
        }


def _installed(*distributions: str) -> Iterator[tuple[str, str]]:
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _measure(
    workload: Workload, programs: dict[str, _Form | _Failure], ceilings: Ceilings, repeats: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """One entry a time: ("rows", …) if there is one, else ("unsupported", …) or ("failed", …)."""
    names = {form: {"op": workload.op, "case": workload.case, "implementation": form} for form in programs}
    ready: dict[str, _Form] = {}
    for form, program in programs.items():
        if isinstance(program, _Failure):
            yield program.kind, names[form] | {"reason": program.reason}
        else:
            ready[form] = program
    if not ready:
        return
    layers = [workload.operands(layer) for layer in range(workload.layers if "own" in workload.buffers else 1)]
    expected = workload.oracle(*layers[0])
    floors = {
        "bytes_us": workload.bytes / ceilings.copy * 1e6,
        "operations_us": workload.operations / ceilings.matmul * 1e6,
    }
    for form, (whole, rest) in ready.items():
        bar = float("inf") if form in workload.foreign else workload.bar
        try:
            figures = _time(workload, whole, layers, (expected, bar), repeats)
            if rest is not None:
                figures = _share(figures, _time(workload, rest, layers, (expected, bar), repeats), workload.layers)
        except Exception as error:  # noqa: BLE001
            yield "failed", names[form] | {"reason": _first_line(error)}
            continue
        for buffers, entry in figures.items():
            yield "rows", names[form] | {"buffers": buffers} | entry | {"floor_us": max(floors.values())} | floors


def _time(workload: Workload, program: _Program, layers: Layers, expected: tuple[Any, float], repeats: int) -> _Figures:
    """Figures with each kind of buffers, if the first result is within the bar that comes with the expected one.

    Raises:
        ValueError: it is not.
    """
    if workload.donates:
        layers = [(jax.tree.map(lambda x: x.copy(), donated), *operands) for donated, *operands in layers]
    first = layers[:1]
    (result,) = program(first)
    layers[:1] = first
    error = workload.error((first[0][0], result) if workload.donates else result, expected[0])
    if error > expected[1]:
        message = f"relative error {error:.2e}, more than {expected[1]:.1e}"
        raise ValueError(message)
    del result
    figures: _Figures = {}
    for buffers in workload.buffers:
        times = time_program(program, layers if buffers == "own" else layers[:1], repeats)
        figures[buffers] = {"us": times.us, "kernels": times.kernels, "rel_err": error}
    return figures


def _share(whole: _Figures, rest: _Figures, layers: int) -> _Figures:
    """Figures of a layer that bears its part of what all of them share; see the module."""
    figures: _Figures = {}
    for buffers, entry in rest.items():
        shared = max(whole[buffers]["us"] - entry["us"], 0.0)
        figures[buffers] = {
            "us": entry["us"] + shared / layers,
            "kernels": entry["kernels"],
            "rel_err": max(whole[buffers]["rel_err"], entry["rel_err"]),
            "layer_us": entry["us"],
            "shared_us": shared,
            "shared_kernels": whole[buffers]["kernels"] - entry["kernels"],
        }
    return figures


def _is_refusal(error: Exception) -> bool:
    """Whether a front door, or a public kernel, says that it cannot serve; compilers raise ValueErrors too."""
    return isinstance(error, ValueError) and any(words in str(error) for words in ("cannot run as", "is not installed"))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _progress(kind: str, entry: dict[str, Any]) -> str:
    name = f"{entry['op']} {entry['case']} {entry['implementation']}"
    return (
        f"{name} {entry['buffers']}: {entry['us']:.1f} us" if kind == "rows" else f"{name}: {kind}, {entry['reason']}"
    )
