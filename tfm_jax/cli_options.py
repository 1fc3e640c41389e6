"""What `tfm` may be asked: options of its commands, and the prompts that they name. Loads no jax."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tfm_jax.config import DraftNoise, FilterOrder, Method, TreeKind, Verifier
from tfm_jax.errors import TfmError, one_sentence, require

type Prompt = str | list[int]

_Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT")]
_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a prompt: the text that plain decoding gives, in fewer passes of the target."""

    demo: bool = False
    """Use the small models that come with the package; this or --model."""
    model: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory that tfm-convert wrote."""
    prompt: _Text = None
    """Raw text: no template and no begin token are added. One of --prompt, --prompt-file, --token-ids."""
    prompt_file: _File = None
    """One prompt a line; in a .jsonl file an object with `prompt` or `token_ids` a line. Runs as one batch."""
    token_ids: Annotated[str | None, tyro.conf.arg(metavar='"1 2 3"')] = None
    """Prompt as token ids."""
    method: Method = "tfm"
    """Weaver tree, tree of the drafter's marginals, drafted chain, or one token at a time."""
    budget: Annotated[int | Literal["auto"], tyro.conf.arg(metavar="{N,auto}")] = 63
    """Most nodes of a tree, the root not counted, 1 to 255; auto chooses in every round, see `tfm calibrate`."""
    max_new_tokens: int = 128
    """Stop after so many new tokens."""
    temperature: float = 0.0
    """0 takes the likeliest token; above, tokens are sampled from the target's own law."""
    top_k: int = 0
    """Sample among the K likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample among the likeliest tokens, each of which has less than P before it; 1 is off."""
    min_p: float = 0.0
    """Sample among tokens at least P times as likely as the likeliest; 0 is off."""
    filter_order: FilterOrder = "sequential"
    """Top-k, top-p, min-p, each on what the one before left; or top-p jointly with top-k, on the whole law."""
    logit_bias: Annotated[str | None, tyro.conf.arg(metavar='"ID:X ID:X"')] = None
    """Numbers added to the logits of tokens; -inf bans one."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens in prompt or text; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtract from a token's logit for every time it is in the text; 0 is off."""
    presence_penalty: float = 0.0
    """Subtract from a token's logit if it is in the text; 0 is off."""
    verifier: Verifier = "target_only"
    """How drafts are accepted; none changes the law of the text. rejection needs the method chain."""
    tree: TreeKind = "pruned"
    """Keep the best of all nodes that the Weaver scored, or those that it expanded, as the paper does."""
    spine: bool = False
    """Keep the likeliest chain in every tree, to the depth that the budget allows."""
    draft_noise: DraftNoise = "shared"
    """Whether drafts know the noise that the target draws with; changes the speed, never the text."""
    costs: _File = None
    """Table for --budget auto; by default costs.json beside the model."""
    seed: int = 0
    """Decides the sampled text, whatever method and budget (with another verifier than target_only: given those)."""
    stop: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT ...")] = ()
    """Texts that end the continuation; they are left out of it."""
    logprobs: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """With --json, report every new token's log-probability and those of the N likeliest tokens in its place."""
    context: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Tokens that the caches hold; by default prompt and new tokens, rounded up."""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, tyro.conf.arg(metavar="{float32,bfloat16}")] = None
    """Compute dtype; by default float32 on a CPU and bfloat16 on a GPU."""
    compare_ar: bool = False
    """Run plain decoding too: its speed, and whether the tokens are equal."""
    trace: _File = None
    """Write every round's tree, accepted path and bonus as JSON lines."""
    json: bool = False
    """Print one JSON array, an object a prompt, and nothing else."""


@dataclasses.dataclass(frozen=True)
class Calibrate:
    """Time a round at several budgets on this machine, for --budget auto."""

    demo: bool = False
    """Use the small models that come with the package; this or --model."""
    model: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory that tfm-convert wrote."""
    method: Literal["tfm", "ddtree"] = "tfm"
    """Which trees."""
    budgets: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")] = (7, 15, 31, 63)
    """Budgets to choose from later."""
    context: int = 512
    """Tokens before the timed rounds."""
    rounds: int = 80
    """Timed rounds of each kind, 16 in a row; the median counts."""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, tyro.conf.arg(metavar="{float32,bfloat16}")] = None
    """Compute dtype; by default float32 on a CPU and bfloat16 on a GPU."""
    output: _File = None
    """Where to write the table; by default costs.json beside the model."""


def parse_arguments(arguments: list[str]) -> Generate | Calibrate:
    """The options.

    Raises:
        TfmError: one of them is mistaken.
    """
    with one_sentence("tfm calibrate" if arguments[:1] == ["calibrate"] else "tfm generate"):
        return tyro.extras.subcommand_cli_from_dict(
            {"generate": Generate, "calibrate": Calibrate},
            prog="tfm",
            description="Lossless tree speculation. `tfm --version` names jax, the device and the kernels.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
        )


def read_prompts(options: Generate) -> list[Prompt]:
    """Prompts as the user gave them, before a model is loaded."""
    sources = (options.prompt, options.prompt_file, options.token_ids)
    given = sum(source is not None for source in sources)
    require(given == 1, "give exactly one of --prompt, --prompt-file and --token-ids.")
    plain = options.verifier == "target_only" or not options.temperature
    require(
        plain or not options.compare_ar,
        f"--compare-ar compares texts, and with --verifier {options.verifier} they differ lawfully; leave one out.",
    )
    require(options.logprobs is None or options.json, "--logprobs shows in JSON only; add --json.")
    if options.prompt_file is not None:
        return _read_prompt_file(options.prompt_file)
    if options.token_ids is not None:
        return [_parse_token_ids(options.token_ids)]
    return [options.prompt or ""]


def _parse_token_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        message = f'--token-ids is {text!r}; write whole numbers with spaces between, such as "1 2 3".'
        raise TfmError(message) from None


def parse_logit_bias(text: str | None) -> dict[int, float] | None:
    """Biases by token id.

    Raises:
        TfmError: the text is not of the form ID:NUMBER.
    """
    if text is None:
        return None
    pairs = [word.partition(":") for word in text.split()]
    try:
        return {int(token): float(value) for token, _, value in pairs}
    except ValueError:
        message = f'--logit-bias is {text!r}; write ID:NUMBER with spaces between, such as "11:-2 13:0.5".'
        raise TfmError(message) from None


def _read_prompt_file(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path} cannot be read ({error}); give a UTF-8 text file."
        raise TfmError(message) from error
    if path.suffix == ".jsonl":
        return [_parse_json_prompt(line, f"{path} line {number}") for number, line in enumerate(lines, 1)]
    for number, line in enumerate(lines, 1):
        require(line != "", f"{path} line {number} is empty; write one prompt a line.")
    return list(lines)


def _parse_json_prompt(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        message = f"{where} is not JSON ({error}); write an object a line."
        raise TfmError(message) from error
    match entry:
        case {"prompt": str(text)} if "token_ids" not in entry:
            return text
        case {"token_ids": [*token_ids]} if "prompt" not in entry and all(type(token) is int for token in token_ids):
            return token_ids
    message = f'{where} must be an object with either "prompt" (a text) or "token_ids" (a list of whole numbers).'
    raise TfmError(message)
