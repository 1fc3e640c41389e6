"""The engine: a loaded checkpoint that generates text, and the parts for people who build their own loop."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax.budget import COSTS_FILE, Costs, read_costs
from tfm_jax.checkpoint import Checkpoint, CheckpointConfig, Dtype, Sharding, load_checkpoint
from tfm_jax.config import Method, Models
from tfm_jax.decode import (
    Params,
    RoundOutput,
    Transcript,
    bind,
    emit_first,
    empty_state,
    first_logprobs,
    prefill_piece,
    run_rounds,
    speculative_round,
    start_transcript,
)
from tfm_jax.errors import require
from tfm_jax.request import Options, Request, check_request, round_up
from tfm_jax.runtime import default_dtype, device_name
from tfm_jax.sampling import Logprobs, gumbel_noise
from tfm_jax.state import DecodeState
from tfm_jax.text import StopText, Tokenizer
from tfm_jax.weaver import WeaverTables

_LIMIT_BUCKET = 128  # transcripts are rounded up to multiples of this, so that similar requests share a compilation
_PIECES = (64, 256, 1024)  # token counts of one prefill call
_ROUNDS_PER_CALL = 32  # rounds of one device-side loop; between calls the host can be interrupted
_ROUNDS_BEFORE_STOPS = 4  # the same where the host has to look for stop texts between calls


@dataclasses.dataclass(frozen=True)
class RoundStats:
    """One round of one prompt: tree nodes without the root, and tokens emitted (bonus included)."""

    nodes: int
    committed: int


@dataclasses.dataclass(frozen=True)
class RoundTrace:
    """The tree of one round (arrays over its nodes, root first), the accepted path and the bonus, uncut."""

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    valid: np.ndarray
    scores: np.ndarray
    path: np.ndarray
    bonus: int


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probability of a token in its place, and the likeliest tokens there with theirs, best first.

    They are those of the law that the token was drawn from: penalties, bias, temperature and filters applied, −inf for
    what a filter drops. At temperature 0, where that law holds one token, temperature 1 stands in.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Round:
    """Tokens of one round as a stream yields them; the first item is the token from prefill (0 nodes, no trace).

    `logprobs` has an entry a token if asked for, else it is None.
    """

    tokens: list[int]
    nodes: int
    committed: int
    done: bool
    trace: RoundTrace | None
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclasses.dataclass(frozen=True)
class Generation:
    """New tokens for one prompt, and how they came; times are seconds and cover the whole batch.

    `token_ids` end with the stop token, or with the token that completes a stop text; `text` has neither, and is None
    without a tokenizer. `logprobs` has an entry a token if asked for.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: Literal["stop", "length"]
    rounds: tuple[RoundStats, ...]
    depth: int
    prefill_seconds: float
    decode_seconds: float
    warmup_seconds: float
    tokens_per_second: float | None

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per round, bonus included; None without a round."""
        return sum(stats.committed for stats in self.rounds) / len(self.rounds) if self.rounds else None

    @property
    def accepted_by_depth(self) -> list[int]:
        """Entry d − 1: rounds that emitted a drafted token at depth d."""
        return [sum(stats.committed > depth for stats in self.rounds) for depth in range(1, self.depth + 1)]


class Engine:
    """A target with, as far as the checkpoint has them, a drafter and a Weaver."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: Any,  # noqa: ANN401 - a numpy dtype
        costs_path: Path | None = None,
    ) -> None:
        self.costs_path = costs_path
        self.config: CheckpointConfig = checkpoint.config
        self.models = Models(checkpoint.config.target, checkpoint.config.drafter, checkpoint.config.weaver)
        self.dtype = dtype
        self.params: Params = {
            name: tree for name in ("target", "drafter", "weaver") if (tree := getattr(checkpoint, name)) is not None
        }
        if "weaver" in self.params:
            self.params["tables"] = jax.jit(functools.partial(_weaver_tables, self.models))(self.params)
        self.tokenizer = None if checkpoint.tokenizer_path is None else Tokenizer.from_file(checkpoint.tokenizer_path)
        self._programs: dict[Any, Any] = {}
        self._compile_seconds = 0.0

    @property
    def methods(self) -> tuple[Method, ...]:
        """Methods that this checkpoint can run, the best first."""
        return self.models.methods

    def generate(self, prompts: Sequence[Sequence[int]], **options: Unpack[Options]) -> list[Generation]:
        """Generates for a batch of prompts with the device-side driver.

        Args:
            prompts: token ids, one non-empty list a prompt.
            **options: see `tfm_jax.request.Options`.

        Raises:
            TfmError: a prompt or an option does not fit the model.
        """
        request = self._check(prompts, options)
        before = self._compile_seconds
        state, first, prefill_seconds = self._begin(request)
        transcript = start_transcript(state, round_up(request.limit, _LIMIT_BUCKET), first)
        rounds = jnp.asarray(_ROUNDS_BEFORE_STOPS if request.stop else _ROUNDS_PER_CALL, jnp.int32)
        run = self._program(run_rounds, state, transcript, rounds)
        start = time.perf_counter()
        watch = _StopWatch(self.tokenizer, request.stop, len(prompts))
        state = watch.look(state, transcript)
        while not np.all(np.asarray(state.done)):
            state, transcript = run(self.params, state, transcript, rounds)
            state = watch.look(state, transcript)
        transcript, emitted = jax.device_get((transcript, state.emitted))
        seconds = time.perf_counter() - start
        lengths = watch.cut(emitted)
        rate = (int(lengths.sum()) - len(prompts)) / seconds if transcript.rounds else None
        texts = (transcript.tokens[row, :length].tolist() for row, length in enumerate(lengths))
        return [
            Generation(
                prompt_token_ids=prompt,
                token_ids=token_ids,
                text=self._text(token_ids, request),
                logprobs=_list_logprobs(token_ids, transcript.logprobs, row),
                finish_reason=_finish_reason(token_ids, request, stopped=watch.stopped(row)),
                rounds=_rounds(transcript.nodes[row], transcript.committed[row], len(token_ids) - 1),
                depth=request.plan.depth,
                prefill_seconds=prefill_seconds,
                decode_seconds=seconds,
                warmup_seconds=self._compile_seconds - before,
                tokens_per_second=rate,
            )
            for row, (prompt, token_ids) in enumerate(zip(request.prompts, texts, strict=True))
        ]

    def stream(self, prompt: Sequence[int], **options: Unpack[Options]) -> Iterator[Round]:
        """Generates for one prompt, a round at a time; same options and same tokens as `generate`.

        Raises:
            TfmError: as `generate`; before the first item.
        """
        request = self._check([prompt], options)
        state, first, _ = self._begin(request)
        step = self._program(speculative_round, state)
        return self._stream(state, first, step, request.stop)

    def prefill(self, prompts: Sequence[Sequence[int]], **options: Unpack[Options]) -> DecodeState:
        """State after the prompts, the first new token chosen (`state.root`). Same options as `generate`.

        The state remembers the options, except for stop texts; hand it to `round`.

        Raises:
            TfmError: as `generate`.
        """
        return self._begin(self._check(prompts, options))[0]

    def round(self, state: DecodeState) -> tuple[DecodeState, RoundOutput]:
        """One round on a state from `prefill`, jitted; `state` is donated, so use only the one that comes back.

        Inside a program of your own (a `lax.while_loop`, say) call `tfm_jax.speculative_round(params, state)` instead
        and pass `engine.params` in as an argument; closing over the engine would bake its weights into the program.
        """
        return _jitted_round(self.params, state)

    def next_logits(self, prompt: Sequence[int]) -> np.ndarray:
        """The target's logits after a prompt: [vocab], float32.

        Raises:
            TfmError: the prompt does not fit the model.
        """
        state = self.prefill([prompt], method="ar", max_new_tokens=1)
        logits = jax.jit(lambda params, feature: bind(self.models, params).target.logits(feature))
        return np.asarray(logits(self.params, state.feature), np.float32)[0]

    def top2_margin(
        self,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        index: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> float:
        """Gap between the two best choices where `token_ids[index]` was chosen: logits plus noise, without filters."""
        context = [*prompt, *token_ids[:index]]
        logits, last = self.next_logits(context), jnp.array([[len(context) - 1]], jnp.int32)
        noise = gumbel_noise(jnp.array([seed], jnp.int32), last, len(logits))
        first, second = np.sort(logits + temperature * np.asarray(noise)[0, 0])[-1:-3:-1]
        return float(first - second)

    def _check(self, prompts: Sequence[Sequence[int]], options: Options) -> Request:
        if options.get("budget") == "auto":
            options = options.copy()
            options["costs"] = self._check_costs(options.get("costs"))
        request = check_request(self.config, self.models, prompts, **options)
        fine = self.tokenizer is not None or not request.stop
        require(fine, "stop texts need a tokenizer, which this checkpoint lacks; give stop_token_ids instead.")
        return request

    def _check_costs(self, costs: Costs | None) -> Costs:
        """The given table or the checkpoint's own, if it holds here."""
        costs = costs or read_costs(self.costs_path or Path(COSTS_FILE))
        there, here = f"{costs.device} in {costs.dtype}", f"{device_name()} in {self.dtype.name}"
        require(there == here, f"the table of costs holds for {there} and this is {here}; run `tfm calibrate` here.")
        return costs

    def _begin(self, request: Request) -> tuple[DecodeState, Logprobs | None, float]:
        """Compiles what is missing, runs the prompts, chooses the first tokens; returns the seconds of the last two."""
        lengths = np.array([len(prompt) for prompt in request.prompts])
        piece = next((size for size in _PIECES if size >= lengths.max()), _PIECES[-1])
        padded = np.zeros((len(lengths), round_up(int(lengths.max()), piece)), np.int32)
        for row, prompt in enumerate(request.prompts):
            padded[row, : len(prompt)] = prompt
        valid = np.arange(padded.shape[1]) < lengths[:, None]
        state = empty_state(
            request.plan.for_prompts,
            capacity=request.capacity,
            limit=jnp.full(lengths.shape, request.limit, jnp.int32),
            temperature=jnp.asarray(request.temperatures, jnp.float32),
            seed=jnp.asarray(request.seeds, jnp.int32),
            stop_ids=jnp.asarray(request.stop_ids, jnp.int32),
            dtype=self.dtype,
        )
        first_piece = (jnp.asarray(padded[:, :piece]), jnp.asarray(valid[:, :piece]))
        run_piece = self._program(prefill_piece, state, *first_piece)
        asked = {name: getattr(request, name) for name in ("plan", "filters", "penalties", "ledger")}
        whole = dataclasses.replace(state, **asked)
        run_first = self._program(emit_first, whole)
        log_first = None if request.plan.logprobs is None else self._program(first_logprobs, whole)
        start = time.perf_counter()
        for begin in range(0, padded.shape[1], piece):
            part = slice(begin, begin + piece)
            state = run_piece(self.params, state, jnp.asarray(padded[:, part]), jnp.asarray(valid[:, part]))
        state = run_first(self.params, dataclasses.replace(state, **asked))
        state.root.block_until_ready()
        seconds = time.perf_counter() - start
        return state, None if log_first is None else log_first(self.params, state), seconds

    def _stream(
        self, state: DecodeState, first: Logprobs | None, step: Callable, stop: tuple[str, ...]
    ) -> Iterator[Round]:
        text = StopText(self.tokenizer, stop) if self.tokenizer and stop else None
        tokens = [int(state.root[0])]
        kept, done = _keep(text, tokens), bool(state.done[0])
        done |= text is not None and text.stopped
        yield Round(tokens[:kept], 0, 1, done, None, _list_logprobs(tokens, jax.device_get(first), 0))
        while not done:
            state, output = step(self.params, state)
            output, done = jax.device_get((output, state.done[0]))
            tree, count = output.tree, int(output.count[0])
            trace = RoundTrace(
                tree.tokens[0], tree.parents[0], tree.depths[0], tree.valid[0], tree.scores[0],
                output.path[0, : int(output.accepted[0]) + 1], int(output.bonus[0]),
            )  # fmt: skip
            nodes = int(tree.valid[0].sum()) - 1
            tokens = output.tokens[0, :count].tolist()
            tokens = tokens[: _keep(text, tokens)]
            done = bool(done) or (text is not None and text.stopped)
            yield Round(tokens, nodes, len(tokens), done, trace, _list_logprobs(tokens, output.logprobs, 0))

    def _text(self, token_ids: list[int], request: Request) -> str | None:
        if self.tokenizer is None:
            return None
        shown = token_ids[:-1] if token_ids[-1] in request.stop_ids else token_ids
        if not request.stop:
            return self.tokenizer.decode(shown)
        text = StopText(self.tokenizer, request.stop)
        return text.feed(shown)[1] + text.finish()

    def _program(self, function: Callable, state: DecodeState, *arguments: Any) -> Callable:  # noqa: ANN401
        """`function(params, state, *arguments)` compiled for these shapes, state (and transcript) donated."""
        leaves, structure = jax.tree.flatten((state, arguments))
        key = (function, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._programs:
            start = time.perf_counter()
            donated = {run_rounds: (1, 2), first_logprobs: ()}.get(function, (1,))
            lowered = jax.jit(function, donate_argnums=donated).lower(self.params, state, *arguments)
            self._programs[key] = lowered.compile()
            self._compile_seconds += time.perf_counter() - start
        return self._programs[key]


def load(path: str | Path, dtype: Dtype | None = None, sharding: Sharding | None = None) -> Engine:
    """Loads a directory that `tfm-convert` wrote, each array straight onto its devices.

    Args:
        path: the directory.
        dtype: compute dtype; by default float32 on a CPU and bfloat16 on a GPU.
        sharding: of every array, such as `NamedSharding(mesh, PartitionSpec())`, or a function from a name
            (`target/layers.0.mixer.qkv.kernel`) and a shape to its sharding. By default everything lies on the first
            device.

    Raises:
        TfmError: nothing there, not a converted checkpoint, or damaged.
    """
    chosen = jnp.dtype(dtype) if dtype else default_dtype()
    return Engine(load_checkpoint(path, chosen.name, sharding), chosen, Path(path) / COSTS_FILE)


def load_demo(dtype: Dtype | None = None) -> Engine:
    """Loads the small trained models that come with the package."""
    with resources.as_file(resources.files("tfm_jax") / "demo") as path:
        return load(path, dtype)


_jitted_round = jax.jit(speculative_round, donate_argnums=1)


def _weaver_tables(models: Models, params: Params) -> WeaverTables:
    modules = bind(models, params)
    return modules.weaver.tables(modules.target.embed_tokens.embedding[...], modules.target.head_rows())


class _StopWatch:
    """Looks for stop texts between calls of the device-side driver."""

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...], rows: int) -> None:
        self._texts = [StopText(tokenizer, stop) for _ in range(rows)] if tokenizer and stop else []
        self._read = np.zeros(rows, int)

    def look(self, state: DecodeState, transcript: Transcript) -> DecodeState:
        """The state with those rows done whose text has come to a stop text."""
        if not self._texts:
            return state
        tokens, emitted, done = jax.device_get((transcript.tokens, state.emitted, state.done))
        for row, text in enumerate(self._texts):
            if not text.stopped:
                self._read[row] += text.feed(tokens[row, self._read[row] : emitted[row]].tolist())[0]
        stopped = np.array([text.stopped for text in self._texts])
        return dataclasses.replace(state, done=jnp.asarray(done | stopped))

    def stopped(self, row: int) -> bool:
        """Whether a stop text ended the row."""
        return bool(self._texts) and self._texts[row].stopped

    def cut(self, emitted: np.ndarray) -> np.ndarray:
        """Lengths of the texts."""
        return self._read if self._texts else emitted


def _keep(text: StopText | None, tokens: list[int]) -> int:
    """How many of the tokens come before or complete a stop text."""
    return len(tokens) if text is None else text.feed(tokens)[0]


def _rounds(nodes: np.ndarray, committed: np.ndarray, new_tokens: int) -> tuple[RoundStats, ...]:
    """Rounds that emitted the tokens after the first one; the last may count fewer than it committed."""
    before = np.cumsum(committed) - committed
    kept = np.clip(new_tokens - before, 0, committed)
    return tuple(RoundStats(int(n), int(c)) for n, c in zip(nodes, kept, strict=True) if c)


def _list_logprobs(tokens: list[int], logprobs: Logprobs | None, row: int) -> tuple[TokenLogprobs, ...] | None:
    if logprobs is None:
        return None
    chosen, ids, top = (values[row].tolist() for values in logprobs)
    return tuple(
        TokenLogprobs(token, chosen[step], tuple(zip(ids[step], top[step], strict=True)))
        for step, token in enumerate(tokens)
    )


def _finish_reason(token_ids: list[int], request: Request, *, stopped: bool) -> Literal["stop", "length"]:
    return "stop" if stopped or token_ids[-1] in request.stop_ids else "length"
