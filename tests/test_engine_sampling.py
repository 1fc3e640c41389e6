"""What users may ask of sampling, end to end on a tiny model: same text everywhere, exact log-probabilities, stops."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from conftest import ROOT
from filter_cases import FilterCase, filtered_law
from goldens import changed
from tiny_model import MODELS, VOCAB, params
from tokenizers import decoders, models

import tfm_jax
from tfm_jax.checkpoint import Checkpoint, CheckpointConfig
from tfm_jax.config import VERIFIERS, DecodePlan
from tfm_jax.decode import bind
from tfm_jax.request import check_request
from tfm_jax.sampling import gumbel_noise
from tfm_jax.text import StopText, Tokenizer

pytestmark = pytest.mark.slow

PROMPTS = [[5, 2, 6], [1], [3, 3, 0, 7, 4], [2, 6]]
NEW = 24
MIXED = {
    "temperature": [1.0, 0.7, 1.6, 0.0],
    "top_k": [0, 5, 0, 3],
    "top_p": [1.0, 1.0, 0.8, 0.5],
    "min_p": [0.0, 0.05, 0.0, 0.0],
    "logit_bias": [{}, {0: -np.inf}, {1: 0.5, 2: -0.5}, {}],
    "seed": [3, 4, 5, 6],
}
ENDLESS = {"max_new_tokens": NEW, "ignore_eos": True}
TREE = {"method": "tfm", "budget": 7, "logprobs": 3}
WORDS = ["a", "b", "ab", "ba", "c", "ca", "bc", "."]


@functools.cache
def engine() -> tfm_jax.Engine:
    """The tiny trio with a tokenizer whose tokens are short words, written without gaps."""
    config = CheckpointConfig(MODELS.target, MODELS.drafter, MODELS.weaver, stop_token_ids=(7,))
    weights = {name: params()[name] for name in ("target", "drafter", "weaver")}
    made = tfm_jax.Engine(Checkpoint(config=config, tokenizer_path=None, **weights), jnp.dtype("float32"))
    backend = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "."))
    backend.decoder = decoders.Fuse()
    made.tokenizer = Tokenizer(backend)
    return made


def row_of(options: dict, row: int) -> dict:
    return {name: values[row] for name, values in options.items()}


def generate(rows: list[int] | None = None, **options: object) -> list[tfm_jax.Generation]:
    """The four prompts with their filters in one batch, in some order, 24 tokens each."""
    rows = list(range(4)) if rows is None else rows
    mixed = {name: [values[row] for row in rows] for name, values in MIXED.items()}
    return engine().generate([PROMPTS[row] for row in rows], **(mixed | ENDLESS | options))


@functools.cache
def plain_texts() -> list[list[int]]:
    """What plain decoding writes."""
    return [generation.token_ids for generation in generate(method="ar")]


# --- same seed, same text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [TREE, {"method": "chain", "budget": 3}], ids=["tfm", "chain"])
def test_filters_keep_the_text_a_function_of_the_seed(options: dict) -> None:
    """Whatever method and budget, whatever the neighbours, their filters and the order of rows."""
    order = [2, 0, 3, 1]
    assert [generation.token_ids for generation in generate(order, **options)] == [plain_texts()[row] for row in order]
    assert len({tuple(text) for text in plain_texts()}) == 4
    assert {len(text) for text in plain_texts()} == {NEW}


def test_plain_texts_are_drawn_from_the_filtered_law_with_the_noise_field() -> None:
    """By hand, a token at a time: argmax(log p + G(seed, position)) of the oracle's law of whole sequences."""
    for row in range(4):
        check_by_hand(PROMPTS[row], plain_texts()[row], case_of(row), MIXED["seed"][row])


def check_by_hand(prompt: list[int], text: list[int], case: FilterCase, seed: int, factors: tuple = (1, 0, 0)) -> None:
    for at, logits in enumerate(teacher_logits(prompt, text)):
        for token in range(VOCAB):
            count = text[:at].count(token)
            if count or token in prompt:
                logits[token] *= 1 / factors[0] if logits[token] > 0 else factors[0]
            logits[token] -= factors[1] * count + factors[2] * bool(count)
        noise = gumbel_noise(jnp.array([seed]), jnp.array([[len(prompt) + at - 1]]), VOCAB)[0, 0]
        with np.errstate(divide="ignore"):
            assert int(np.argmax(np.log(filtered_law(logits, case)) + noise)) == text[at]


@functools.cache
def alone() -> list[tfm_jax.Round]:
    """One of the prompts without its neighbours, streamed."""
    return list(engine().stream(PROMPTS[2], **(row_of(MIXED, 2) | ENDLESS | TREE)))


def test_a_stream_without_neighbours_writes_the_same_text() -> None:
    assert [token for step in alone() for token in step.tokens] == plain_texts()[2]


def test_greedy_and_plain_decoding_have_one_program_for_all_verifiers() -> None:
    def plan(method: str, verifier: str, temperature: float) -> DecodePlan:
        options = {"method": method, "verifier": verifier, "temperature": temperature, "max_new_tokens": 2}
        return check_request(engine().config, MODELS, [[1]], **options).plan

    for verifier in VERIFIERS:
        assert plan("chain", verifier, 0.0) == plan("chain", "target_only", 0.0)
        assert plan("ar", verifier, 1.0) == plan("ar", "target_only", 1.0)
        assert plan("chain", verifier, 1.0).verifier == verifier


# --- log-probabilities and penalties ----------------------------------------------------------------------------------


def teacher_logits(prompt: list[int], text: list[int]) -> np.ndarray:
    """The target's logits in every new token's place, from the whole sequence: [new, vocab]."""
    tokens = np.zeros((1, 32), np.int32)  # right-padded: one compilation
    tokens[0, : len(prompt) + len(text) - 1] = [*prompt, *text[:-1]]
    logits = np.asarray(_sequence_logits(params(), jnp.asarray(tokens)), np.float64)
    return logits[0, len(prompt) - 1 :][: len(text)]


@jax.jit
def _sequence_logits(params: dict, tokens: jax.Array) -> jax.Array:
    target = bind(MODELS, params).target
    return target.logits(target.sequence(tokens, jnp.ones(tokens.shape, bool)).hidden)


def case_of(row: int) -> FilterCase:
    settings = row_of(MIXED, row)
    bias = tuple(settings.pop("logit_bias").items())
    settings.pop("seed")
    return FilterCase("", bias=bias, **settings)


def test_logprobs_of_every_token_are_the_laws_own() -> None:
    """From prefill's token on, for both drivers; at temperature 0 those of temperature 1."""
    entries = [generation.logprobs for generation in generate(**TREE)]
    streamed = [entry for step in alone() for entry in step.logprobs]
    for row, found in [*enumerate(entries), (2, streamed)]:
        case = dataclasses.replace(case_of(row), temperature=MIXED["temperature"][row] or 1.0)
        assert [entry.token_id for entry in found] == plain_texts()[row]
        for entry, logits in zip(found, teacher_logits(PROMPTS[row], plain_texts()[row]), strict=True):
            with np.errstate(divide="ignore"):
                expected = np.log(filtered_law(logits, case))
            best = np.sort(expected)[::-1][:3]
            ids, values = zip(*entry.top, strict=True)
            np.testing.assert_allclose(entry.logprob, expected[entry.token_id], atol=1e-4)
            np.testing.assert_allclose(values, best, atol=1e-4)
            np.testing.assert_allclose(expected[list(ids)], best, atol=1e-4)
    assert generate(method="chain", budget=3)[0].logprobs is None


def test_penalties_follow_the_text() -> None:
    """By hand: penalties counted anew for every token from the text so far, trees that repeat tokens and all."""
    factors = {
        "repetition_penalty": [1.3, 1.0, 1.2, 1.0],
        "frequency_penalty": [0.4, 0.0, 0.3, 0.5],
        "presence_penalty": [0.8, 0.0, 0.0, 0.6],
    }
    for row, generation in enumerate(generate(budget=7, **factors)):
        check_by_hand(
            PROMPTS[row], generation.token_ids, case_of(row), MIXED["seed"][row], (*row_of(factors, row).values(),)
        )
        assert (generation.token_ids == plain_texts()[row]) == (row == 1)


# --- stops ------------------------------------------------------------------------------------------------------------


def cut_by_hand(token_ids: list[int], stops: list[str]) -> tuple[list[int], str, bool]:
    """Tokens up to the one that completes a stop text, and the text before the stop text."""
    for count in range(1, len(token_ids) + 1):
        text = "".join(WORDS[token] for token in token_ids[:count])
        if starts := [text.find(stop) for stop in stops if stop in text]:
            return token_ids[:count], text[: min(starts)], True
    return token_ids, "".join(WORDS[token] for token in token_ids), False


def test_stop_texts_end_the_text_wherever_they_begin() -> None:
    """Inside a token, over the boundary of two rounds, in the first token; rows of a batch stop on their own."""
    stopped = 0
    for stops in (["abc"], ["bca", "cc"], [WORDS[plain_texts()[0][0]]], ["zzz"]):
        for row, generation in enumerate(generate(stop=stops, **TREE)):
            token_ids, text, cut = cut_by_hand(plain_texts()[row], stops)
            stopped += cut
            assert (generation.token_ids, generation.text) == (token_ids, text)
            assert generation.finish_reason == ("stop" if cut else "length")
            assert 1 + sum(stats.committed for stats in generation.rounds) == len(token_ids)
            assert len(generation.logprobs) == len(token_ids)
    assert stopped >= 5
    stops = ["bca", "cc"]
    rounds = list(engine().stream(PROMPTS[2], stop=stops, **(row_of(MIXED, 2) | ENDLESS | TREE)))
    assert [token for step in rounds for token in step.tokens] == cut_by_hand(plain_texts()[2], stops)[0]
    assert [step.done for step in rounds] == [False] * (len(rounds) - 1) + [True]
    assert all(step.committed == len(step.tokens) for step in rounds)


def test_a_stop_token_before_a_stop_text_comes_first() -> None:
    text = plain_texts()[0]
    stop_id = next(token for token in text[2:] if token not in text[:2])
    generation = generate(stop="zzz", stop_token_ids=[stop_id], ignore_eos=False, **TREE)[0]
    expected = text[: text.index(stop_id) + 1]
    assert (generation.token_ids, generation.finish_reason) == (expected, "stop")
    assert generation.text == "".join(WORDS[token] for token in expected[:-1])


@pytest.mark.parametrize("pieces", [[[0, 1, 4, 5]], [[0], [1], [4], [5]], [[0, 1], [4, 5]]])
def test_text_before_a_stop_is_shown_once_it_is_clear(pieces: list[list[int]]) -> None:
    """A b c ca with the stop text "bcc": "a" can be shown at once, "bc" only never, the stop being complete in "ca"."""
    text = StopText(engine().tokenizer, ["bcc"])
    taken = [text.feed(piece) for piece in pieces]
    assert sum(count for count, _ in taken) == 4
    assert "".join(shown for _, shown in taken) == "a"
    assert text.stopped
    assert (text.feed([0]), text.finish()) == ((0, ""), "")
    other = StopText(engine().tokenizer, ["bcc", "cx"])
    assert [other.feed([token])[1] for token in (0, 1, 4, 1)] == ["a", "", "", "bc"]
    assert other.finish() == "b"


# --- bad options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": [0.1, 0.2]}, "min_p has 2 values for 1 prompts"),
        ({"logit_bias": {8: 1.0}}, "token 8"),
        ({"logit_bias": {1: float("inf")}}, "token 1 is inf"),
        ({"logit_bias": dict.fromkeys(range(VOCAB), -np.inf)}, "bans every token"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf"),
        ({"filter_order": "random"}, "filter_order 'random'"),
        ({"verifier": "magic"}, "verifier 'magic'"),
        ({"verifier": "rejection"}, "method is tfm"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 9}, "logprobs is 9; choose 0 to 8"),
        ({"stop": ["a", ""]}, "a stop text is empty"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict, words: str) -> None:
    with pytest.raises(tfm_jax.TfmError, match=re.escape(words)):
        engine().generate([[1, 2]], max_new_tokens=2, **options)


MISTYPED = """
import tfm_jax

engine = tfm_jax.load_demo()
for prompts, options in (
    (["abc"], {}), ("abc", {}), ([1, 2], {}), ([[1.5]], {}), ([[1]], {"budget": 7.5}), ([[1]], {"budget": "foo"}),
    ([[1]], {"max_new_tokens": 2.5}), ([[1]], {"seed": 1.5}), ([[1]], {"top_k": 2.5}), ([[1]], {"logprobs": 1.5}),
):
    try:
        engine.generate(prompts, **options)
    except tfm_jax.TfmError as error:
        print(error)
"""


def test_other_types_are_refused_by_name() -> None:
    """In a process of its own, where no checker of types speaks first."""
    run = subprocess.run([sys.executable, "-c", MISTYPED], capture_output=True, text=True, check=True, cwd=ROOT)
    said = run.stdout.splitlines()
    assert len(said) == 10
    starts = ("a prompt is 'abc'", "a prompt is 'a'", "a prompt is 1;", "token id 1.5 at position 0", "budget is 7.5;")
    starts += (
        "budget is 'foo'; give a whole number",
        "max_new_tokens is 2.5",
        "seed is 1.5",
        "top_k is 2.5",
        "logprobs is 1.5",
    )
    for sentence, start in zip(said, starts, strict=True):
        assert sentence.startswith(start)


def test_stop_texts_need_a_tokenizer() -> None:
    with pytest.raises(tfm_jax.TfmError, match="need a tokenizer"):
        changed(engine(), tokenizer=None).generate([[1, 2]], max_new_tokens=2, stop="a")
