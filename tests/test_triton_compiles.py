"""Triton kernels through Triton's compiler and ptxas, without a GPU: the launches that the Triton forms ask for.

Triton has its own rules for names and types in loops, which only its compiler checks, and which choices of compile-time
sizes meet them is not to be seen in the code.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from test_weaver_kernel import door_operands, make_weaver

from pallas_kernels import Prefix, triton_attention, triton_gdn, triton_top_k, triton_weaver_tree

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # neither jax nor flax has a part in it

# Compute capability: multiprocessors of a usual device, and shared memory a program may use (CUDA C programming guide).
DEVICES = {"8.0": (108, 163 * 1024), "8.6": (84, 99 * 1024), "9.0": (132, 227 * 1024), "10.0": (148, 227 * 1024)}
POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32", "bool": "*i1"}


class Launch(NamedTuple):
    kernel: Any
    arrays: list[Any]  # operands, then results
    options: dict[str, int]
    sizes: dict[str, Any]  # compile-time arguments


@pytest.fixture(params=DEVICES)
def capability(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, capability: str, tmp_path: Path) -> list[Launch]:
    """The launches since, from a jax-triton that compiles nothing, for such a device."""
    launched: list[Launch] = []

    def triton_call(*operands: jax.Array, kernel: Any, out_shape: Any, grid: tuple[int, ...], **others: Any) -> Any:  # noqa: ANN401
        assert all(size > 0 for size in grid)
        results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)
        options = {name: others.pop(name) for name in ("num_warps", "num_stages") if name in others}
        for name in ("name", "zeroed_outputs", "input_output_aliases"):
            others.pop(name, None)
        launched.append(Launch(kernel, [*operands, *jax.tree.leaves(results)], options, others))
        return results

    stand_in = ModuleType("jax_triton")
    stand_in.triton_call = triton_call  # pyrefly: ignore[missing-attribute]
    monkeypatch.setitem(sys.modules, "jax_triton", stand_in)
    device = SimpleNamespace(compute_capability=capability, core_count=DEVICES[capability][0])
    monkeypatch.setattr(triton_attention.jax, "devices", lambda: [device])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # else a fault of last time would be found again, or none
    return launched


class Compiler(NamedTuple):
    """What Triton needs to compile a launch for a device."""

    source: Any
    target: Any
    options: dict[str, int]

    @classmethod
    def of(cls, launch: Launch, capability: str) -> Compiler:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = launch.kernel.arg_names
        pointers = names[: len(launch.arrays)]
        assert set(names) == {*pointers, *launch.sizes}
        types = {name: POINTERS[x.dtype.name] for name, x in zip(pointers, launch.arrays, strict=True)}
        signature = {name: types.get(name, "constexpr") for name in names}
        aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(pointers))}
        source = ASTSource(launch.kernel, signature, {(names.index(k),): v for k, v in launch.sizes.items()}, aligned)
        return cls(source, GPUTarget("cuda", int(capability.replace(".", "")), 32), launch.options)

    def to_ir(self) -> str:
        """The first step alone, in which the language's rules are checked: seconds less than all of them.

        Raises:
            triton.CompilationError: the kernel breaks a rule.
        """
        from triton._C.libtriton import ir
        from triton.compiler.compiler import make_backend

        backend = make_backend(self.target)
        options = backend.parse_options(self.options)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        return str(self.source.make_ir(self.target, options, functions, modules, context))

    def shared_memory(self) -> int:
        """Compiles down to machine code; bytes that a program uses."""
        return triton.compile(self.source, target=self.target, options=self.options).metadata.shared


def check(launches: list[Launch], capability: str, kernels: list[str]) -> None:
    assert [launch.kernel.fn.__name__ for launch in launches] == kernels
    for launch in launches:
        assert Compiler.of(launch, capability).shared_memory() <= DEVICES[capability][1]


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:  # noqa: ANN401 - whatever names a dtype
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("nodes", "width", "dtype", "precision"),
    [(1, 16, "float32", "highest"), (64, 128, "bfloat16", "default"), (65, 128, "float32", "highest")],
)
def test_trees_of_the_gated_delta_rule(
    launches: list[Launch], capability: str, nodes: int, width: int, dtype: str, precision: str
) -> None:
    heads, value_heads, f32 = 16, 48, jnp.float32
    operands = (
        shape(1, nodes, heads, width, dtype=dtype), shape(1, nodes, heads, width, dtype=dtype),
        shape(1, nodes, value_heads, width, dtype=dtype), shape(1, nodes, value_heads, dtype=f32),
        shape(1, nodes, value_heads, dtype=f32), shape(1, nodes, nodes, dtype=bool),
        shape(1, value_heads, width, width, dtype=f32),
    )  # fmt: skip
    jax.eval_shape(lambda *x: triton_gdn.gdn_tree_verify(*x, precision=precision), *operands)
    check(launches, capability, ["verify_tree"])


@pytest.mark.parametrize(
    ("nodes", "head", "dtype", "window"),
    [(64, 256, "bfloat16", 0), (1, 256, "bfloat16", 0), (200, 64, "float32", 100), (64, 256, "float32", 0)],
)
def test_attention(launches: list[Launch], capability: str, nodes: int, head: int, dtype: str, window: int) -> None:
    cache = shape(1, 4, 4096, head, dtype=dtype)
    prefix = Prefix(cache, cache, shape(1, dtype=jnp.int32), shape(1, nodes, dtype=jnp.int32))
    own = shape(1, nodes, 4, head, dtype=dtype)
    operands = (shape(1, nodes, 24, head, dtype=dtype), own, own, shape(1, nodes, nodes, dtype=bool), prefix)
    jax.eval_shape(lambda *x: triton_attention.tree_attention(*x, window=window), *operands)
    check(launches, capability, ["attend_share", "merge_shares"])


@pytest.mark.parametrize(("vocab", "k", "dtype"), [(248_320, 512, "float32"), (4096, 1, "bfloat16")])
def test_the_largest(launches: list[Launch], capability: str, vocab: int, k: int, dtype: str) -> None:
    jax.eval_shape(lambda x: triton_top_k.top_k(x, k=k), shape(15, vocab, dtype=dtype))
    check(launches, capability, ["group_maxima", "filter_row", "rank_candidates"])


def grow(width: int, groups: int, ahead: int, *, rank: int = 512, pool: int = 64) -> None:
    weaver, arguments = make_weaver(rank=rank, pool=64, depth=7, dtype="bfloat16", batch=1)
    root, _, _, *others = door_operands(weaver, arguments)
    candidates = shape(7, pool, dtype=jnp.int32), shape(7, pool, dtype=jnp.float32)
    door = functools.partial(triton_weaver_tree.weaver_tree, width=width, groups=groups, expand=8, ahead=ahead)
    jax.eval_shape(door, root, *candidates, *others)


@pytest.mark.parametrize("capability", ["9.0"], indirect=True)
def test_trees_of_the_released_weaver(launches: list[Launch], capability: str) -> None:
    grow(4, 9, 1, rank=2048, pool=512)
    check(launches, capability, ["grow_kernel"])


@pytest.mark.parametrize("capability", ["8.0"], indirect=True)
def test_every_schedule_of_a_weaver(launches: list[Launch], capability: str) -> None:
    for schedule in ((4, 6, 0), (4, 4, 1), (2, 5, 3), (5, 4, 1), (16, 3, 0), (1, 7, 0), (16, 1, 0), (1, 2, 15)):
        grow(*schedule)
        assert "grow_kernel" in Compiler.of(launches[-1], capability).to_ir()
    grow(3, 2, 0)
    check(launches[-1:], capability, ["grow_kernel"])
