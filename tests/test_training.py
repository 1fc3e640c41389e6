"""Losses against hand calculation, batches and resumption bit for bit, and training forwards against inference."""

from __future__ import annotations

import dataclasses
import json
import lzma
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from tfm_jax.config import DecodePlan, Models
from tfm_jax.data import (
    Continuations,
    choose_prompts,
    shuffled_rows,
    shuffled_windows,
    step_key,
    take_rows,
    tokenise,
)
from tfm_jax.decode import bind, empty_state, prefill_piece
from tfm_jax.errors import TfmError
from tfm_jax.losses import (
    DraftTargets,
    Loss,
    Pool,
    depth_weights,
    drafter_loss,
    lk_terms,
    reached,
    token_losses,
    top_pool,
    weaver_loss,
)
from tfm_jax.objectives import (
    DraftData,
    Drafted,
    Drawn,
    Network,
    bits_per_character,
    draft_blocks,
    drafter_network,
    drafter_objective,
    target_network,
    target_objective,
    weaver_logits,
    weaver_network,
    weaver_objective,
)
from tfm_jax.presets import demo_trio, tiny_trio
from tfm_jax.target import Target
from tfm_jax.training import Settings, TrainState, build_optimizer, learning_rate, make_step, train

pytestmark = pytest.mark.slow

TRIO = tiny_trio()
TARGET = dataclasses.replace(TRIO.target, layer_types=("linear_attention", "full_attention"))
DRAFTER = dataclasses.replace(TRIO.drafter, target_layers=(0, 1), layer_windows=(8, 0))
F32 = jnp.dtype(jnp.float32)


@pytest.fixture(scope="module")
def params() -> dict:
    """Random target, drafter and Weaver."""
    networks = {
        "target": target_network(TARGET, F32),
        "drafter": drafter_network(DRAFTER, F32),
        "weaver": weaver_network(TRIO.weaver, F32),
    }
    return {name: network.initial(seed) for seed, (name, network) in enumerate(networks.items())}


@pytest.fixture(scope="module")
def continuations() -> Continuations:
    tokens = np.random.default_rng(0).integers(4, TARGET.vocab_size, (6, 24)).astype(np.uint16)
    return Continuations(jnp.asarray(tokens), jnp.asarray([5, 8, 6, 9, 7, 10]), jnp.asarray([24, 20, 24, 11, 24, 24]))


# Schedule, weights, losses


def test_schedule_warms_up_stays_and_decays_to_zero() -> None:
    settings = Settings(steps=100, learning_rate=0.5, warmup=10, decay=0.2)
    rates = [float(learning_rate(settings, step)) for step in (0, 4, 9, 50, 80, 90, 99, 100)]
    np.testing.assert_allclose(rates, [0.05, 0.25, 0.5, 0.5, 0.5, 0.25, 0.025, 0.0], rtol=1e-6)


def test_depth_weights_decay_with_the_exponent_of_the_paper() -> None:
    np.testing.assert_allclose(np.asarray(depth_weights(15))[[0, 7, 14]], [1.0, np.exp(-1.0), np.exp(-2.0)], rtol=1e-6)


def test_drafter_loss_is_the_weighted_mean_over_valid_slots() -> None:
    rng = np.random.default_rng(1)
    logits, teacher = rng.normal(size=(2, 1, 2, 3, 5))
    valid = np.array([[[True, True, True], [True, False, False]]])
    tokens = np.argmax(logits, -1)
    tokens[0, 0, 1] = (tokens[0, 0, 1] + 1) % 5
    targets = DraftTargets(jnp.asarray(teacher, F32), jnp.asarray(tokens), jnp.asarray(valid))
    loss = drafter_loss(jnp.asarray(logits, F32), targets, gamma=2.0)
    p = np.exp(teacher) / np.exp(teacher).sum(-1, keepdims=True)
    losses = -(p * np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))).sum(-1)
    weights = np.exp(-np.arange(3) / 2.0) * valid
    np.testing.assert_allclose(loss.value, (weights * losses).sum() / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(loss.metrics["accuracy"], 3 / 4)
    np.testing.assert_allclose(loss.metrics["chain"], (2 + 2) / 2)  # a hit and a miss; a hit and the end


def test_lk_loss_of_three_tokens_by_hand_and_by_finite_differences() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    variation, divergence = 0.4, 0.5 * np.log(2.5) + 0.3 * np.log(1.5) + 0.2 * np.log(1 / 3)
    mix = np.exp(-2.0 * 0.6)
    by_hand = mix * divergence + (1 - mix) * variation - 0.1 * np.log(0.2)
    target, weaver = jnp.log(jnp.asarray(p, F32)) + 3.0, jnp.log(jnp.asarray(q, F32)) - 1.0
    terms = lk_terms(target, weaver)
    np.testing.assert_allclose(terms.loss, by_hand, rtol=1e-5)
    np.testing.assert_allclose(terms.acceptance, 0.6, rtol=1e-5)

    def with_fixed_mix(logits: np.ndarray) -> float:
        r = np.exp(logits) / np.exp(logits).sum()
        return mix * (p * np.log(p / r)).sum() + (1 - mix) * 0.5 * np.abs(p - r).sum() - 0.1 * np.log(r[0])

    logits, step = np.log(q), 1e-6
    numeric = [(with_fixed_mix(logits + e) - with_fixed_mix(logits - e)) / (2 * step) for e in step * np.eye(3)]
    gradient = jax.grad(lambda x: lk_terms(target, x).loss)(weaver)
    np.testing.assert_allclose(gradient, numeric, atol=1e-5)


def test_walk_is_cut_after_a_rejection_and_where_the_pool_lacks_the_token() -> None:
    p, q = jnp.log(jnp.asarray([0.25, 0.75])), jnp.log(jnp.asarray([0.5, 0.5]))
    true = jnp.asarray([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])  # ratios 1/2 and 3/2
    uniforms = jnp.asarray([[0.4, 0.6, 0.0, 0.0], [0.99, 0.99, 0.99, 0.99], [0.49, 0.49, 0.49, 0.0]])
    is_true = (true[..., None] == jnp.arange(2)) & jnp.asarray([True, True, True])[:, None, None]
    is_true = is_true.at[1, 1].set(False)
    rows = jnp.broadcast_to(p, is_true.shape), jnp.broadcast_to(q, is_true.shape)
    expected = [[True, True, False, False], [True, True, False, False], [True, True, True, True]]
    np.testing.assert_array_equal(reached(*rows, is_true, uniforms), expected)


def test_masked_positions_have_no_gradient() -> None:
    rng = np.random.default_rng(2)
    teacher, logits = (jnp.asarray(rng.normal(size=shape), F32) for shape in ((1, 2, 3, 9), (1, 2, 3, 4)))
    pool = Pool(jnp.asarray(rng.permuted(np.tile(np.arange(9), (1, 2, 3, 1)), axis=-1)[..., :4]), logits)
    tokens = pool.ids[..., 0].at[0, 0, 1].set(pool.ids[0, 0, 1, 0])
    tokens = tokens.at[0, 0, 0].set(next(t for t in range(9) if t not in pool.ids[0, 0, 0]))  # outside the pool
    targets = DraftTargets(teacher, tokens, jnp.asarray([[[True, True, True], [True, False, False]]]))
    gradient = jax.grad(lambda x: weaver_loss(x, pool, targets, jnp.zeros((1, 2, 3))).value)(logits)
    moved = np.abs(np.asarray(gradient)).sum(-1) > 0
    np.testing.assert_array_equal(moved, [[[True, False, False], [True, False, False]]])


@pytest.mark.parametrize(("vocab", "size"), [(512, 8), (1024, 64), (1000, 7), (64, 8)])
def test_top_pool_equals_top_k(vocab: int, size: int) -> None:
    logits = jax.random.normal(jax.random.key(vocab), (3, 2, vocab))
    scores, ids = jax.lax.top_k(logits, size)
    pool = top_pool(logits, size)
    np.testing.assert_array_equal(pool.scores, scores)
    np.testing.assert_array_equal(pool.ids, ids)


# Data


def write_text(path: Path, texts: list[str]) -> Path:
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return path


def write_tokenizer(path: Path) -> Path:
    """One id a byte after two specials."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate(["<|endoftext|>", "<|mask|>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|mask|>"])
    tokenizer.save(str(path))
    return path


def test_tokens_of_a_text_are_packed_ended_and_kept(tmp_path: Path) -> None:
    texts = ["abc", "naïve <|mask|>", "z"]
    text, tokenizer = write_text(tmp_path / "text.jsonl.xz", texts), write_tokenizer(tmp_path / "tokenizer.json")
    first = tokenise(text, tokenizer, tmp_path / "cache")
    decoder = tokenizers.Tokenizer.from_file(str(tokenizer))
    documents = [first.tokens[a:b] for a, b in zip(first.starts[:-1], first.starts[1:], strict=True)]
    assert [decoder.decode(document[:-1]) for document in documents] == texts
    assert [int(document[-1]) for document in documents] == [0, 0, 0]
    assert first.characters == 18
    stamp = next((tmp_path / "cache").iterdir()).stat().st_mtime_ns
    np.testing.assert_array_equal(tokenise(text, tokenizer, tmp_path / "cache").tokens, first.tokens)
    assert [path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()] == [stamp]


def test_bad_text_is_a_clear_error(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n[1]\n', encoding="utf-8")
    with pytest.raises(TfmError, match="line 2"):
        tokenise(tmp_path / "bad.jsonl", tokenizer, tmp_path)
    with pytest.raises(TfmError, match="no such file"):
        tokenise(tmp_path / "absent.jsonl", tokenizer, tmp_path)


def test_every_epoch_visits_every_row_once_in_another_order() -> None:
    epochs = [[shuffled_rows(3, jnp.asarray(4 * epoch + i), 12, 3) for i in range(4)] for epoch in range(2)]
    first, second = (np.concatenate(batches) for batches in epochs)
    np.testing.assert_array_equal(np.sort(first), np.arange(12))
    np.testing.assert_array_equal(np.sort(second), np.arange(12))
    assert (first != second).any()
    with pytest.raises(TfmError, match="fewer than a batch"):
        shuffled_rows(0, jnp.asarray(0), 2, 3)


def test_windows_are_consecutive_tokens_and_disjoint_within_an_epoch() -> None:
    tokens = jnp.arange(100, dtype=jnp.uint16)
    windows = np.concatenate([shuffled_windows(tokens, 0, jnp.asarray(step), 3, 10) for step in range(2)])
    np.testing.assert_array_equal(np.diff(windows, axis=1), 1)
    assert len(np.unique(windows[:, :-1])) == 60


def test_prompts_begin_documents_first_and_stay_inside_them(tmp_path: Path) -> None:
    texts = ["a" * 30, "b" * 5, "c" * 12]
    text = tokenise(
        write_text(tmp_path / "text.jsonl.xz", texts), write_tokenizer(tmp_path / "tokenizer.json"), tmp_path
    )
    prompts = choose_prompts(text, 8, 8, 16, seed=0)
    assert prompts.lengths.min() >= 8
    assert prompts.lengths.max() <= 16
    heads = {text.tokens[0], text.tokens[text.starts[2]]}
    for row, length in zip(prompts.tokens, prompts.lengths, strict=True):
        assert set(row[:length]) <= heads
        assert len(set(row[:length])) == 1
    assert set(prompts.tokens[:2, 0]) == heads


# Optimiser and loop


def toy_objective(params: dict, data: jax.Array, step: jax.Array) -> Loss:
    """Noisy regression with a kernel (Muon) and a bias (AdamW)."""
    rows = data[shuffled_rows(0, step, data.shape[0], 4)]
    noise = jax.random.normal(step_key(0, step), rows.shape)
    error = rows @ params["layer"]["kernel"] + params["layer"]["bias"] - rows[:, ::-1] + 0.1 * noise
    return Loss(jnp.mean(error**2), {"largest": jnp.max(jnp.abs(error))})


TOY = Settings(steps=12, learning_rate=0.05, warmup=2, log_every=2, save_every=4, evaluate_every=6)


def run_toy(run: Path, settings: Settings = TOY, **options: object) -> TrainState:
    return train(
        run,
        objective=options.pop("objective", toy_objective),
        initial=lambda: {"layer": {"kernel": jnp.eye(3), "bias": jnp.zeros(3)}},
        data=jax.random.normal(jax.random.key(1), (10, 3)),
        settings=settings,
        inputs={"data": "toy"},
        evaluate=lambda params: {"norm": float(jnp.linalg.norm(params["layer"]["kernel"]))},
        **options,
    )


def assert_same_bits(first: TrainState, second: TrainState) -> None:
    jax.tree.map(np.testing.assert_array_equal, first, second)


def read_log(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds_a_step"} for line in lines]


def test_a_run_cut_by_its_deadline_ends_with_the_bits_of_an_uncut_one(tmp_path: Path) -> None:
    whole = run_toy(tmp_path / "whole")
    cuts = 0
    while int((state := run_toy(tmp_path / "cut", deadline=0.0)).step) < TOY.steps:
        cuts += 1
    assert cuts == 5
    assert_same_bits(state, whole)
    assert read_log(tmp_path / "cut") == read_log(tmp_path / "whole")


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    def killed(_: dict) -> dict:
        raise KeyboardInterrupt

    whole = run_toy(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(
            tmp_path / "cut",
            objective=toy_objective,
            initial=lambda: {"layer": {"kernel": jnp.eye(3), "bias": jnp.zeros(3)}},
            data=jax.random.normal(jax.random.key(1), (10, 3)),
            settings=TOY,
            inputs={"data": "toy"},
            evaluate=killed,  # at step 6; the last checkpoint is of step 4
        )
    assert_same_bits(run_toy(tmp_path / "cut"), whole)
    assert read_log(tmp_path / "cut") == read_log(tmp_path / "whole")


def test_steps_may_change_before_the_decay_and_nothing_else_may(tmp_path: Path) -> None:
    run_toy(tmp_path, dataclasses.replace(TOY, steps=100), deadline=0.0)
    with pytest.raises(TfmError, match="other settings"):
        run_toy(tmp_path, dataclasses.replace(TOY, learning_rate=0.1))
    assert int(run_toy(tmp_path, TOY).step) == 12
    with pytest.raises(TfmError, match="decay has begun"):
        run_toy(tmp_path, dataclasses.replace(TOY, steps=100))


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    def broken(params: dict, _data: jax.Array, _step: jax.Array) -> Loss:
        return Loss(jnp.sum(params["layer"]["bias"]) / 0.0, {})

    with pytest.raises(TfmError, match="the loss is nan at step 2"):
        run_toy(tmp_path, objective=broken)


def test_muon_takes_linear_kernels_and_adamw_the_rest(params: dict) -> None:
    state = build_optimizer(TOY).init(params["target"])
    by_name = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)}
    muon = {name for name in by_name if "['muon']" in name and ".mu" in name and "kernel" in name}
    assert len(muon) == 8  # in_proj or qkv, out, gate_up and down of two layers
    assert not any("conv" in name or "embedding" in name for name in muon)


# Models in training


def test_target_learns_one_batch_by_heart() -> None:
    network = target_network(TARGET, F32)
    tokens = jax.random.randint(jax.random.key(0), (70,), 0, TARGET.vocab_size).astype(jnp.uint16)
    settings = Settings(steps=60, learning_rate=2e-2, warmup=5)
    optimizer = build_optimizer(settings)
    step = make_step(target_objective(network, seed=0, batch=3, length=16), optimizer)
    start = network.initial(0)
    state = TrainState(jnp.zeros((), jnp.int32), start, optimizer.init(start))
    losses = []
    for _ in range(settings.steps):
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    assert losses[0] > 5.0
    assert losses[-1] < 0.3


def test_embedding_gradient_is_that_of_a_gather(params: dict) -> None:
    network = target_network(TARGET, F32)
    plain = Network(lambda **options: Target(TARGET, **options), F32)
    tokens = jnp.asarray([[5, 7, 5, 9, 5, 1]])

    def loss(network: Network, params: dict) -> jax.Array:
        return jnp.sum(network.bind(params).embed(tokens)[..., 3] * jnp.arange(6.0))

    ours, gather = (jax.grad(loss, argnums=1)(n, params["target"]) for n in (network, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours, gather)


def test_bfloat16_objectives_have_finite_gradients(params: dict, continuations: Continuations) -> None:
    half = jnp.dtype(jnp.bfloat16)
    frozen = {
        "target": target_network(TARGET, half).cast(params["target"]),
        "drafter": drafter_network(DRAFTER, half).cast(params["drafter"]),
    }
    options = {"seed": 0, "batch": 2, "anchors": 2}
    data = DraftData(frozen, continuations)
    cases = {
        "target": (
            target_objective(target_network(TARGET, half), seed=0, batch=2, length=8),
            jnp.arange(40, dtype=jnp.uint16),
        ),
        "drafter": (drafter_objective(TARGET, DRAFTER, half, **options), data),
        "weaver": (weaver_objective(TARGET, DRAFTER, TRIO.weaver, half, **options), data),
    }
    for model, (objective, data) in cases.items():
        gradient = jax.jit(jax.grad(lambda p, d, f=objective: f(p, d, jnp.asarray(0)).value))(params[model], data)
        leaves = jax.tree.leaves(gradient)
        assert all(leaf.dtype == jnp.float32 and bool(jnp.isfinite(leaf).all()) for leaf in leaves)
        assert any(bool((leaf != 0).any()) for leaf in leaves)


def draft(params: dict, rows: Continuations, anchors: list[list[int]]) -> jax.Array:
    return run_blocks(params, rows, anchors).hidden


def run_blocks(params: dict, rows: Continuations, anchors: list[list[int]]) -> Drafted:
    return _run_blocks(params, rows, jnp.asarray(anchors))


@jax.jit
def _run_blocks(params: dict, rows: Continuations, anchors: jax.Array) -> Drafted:
    modules = bind(Models(TARGET, DRAFTER), params)
    return draft_blocks(modules.target, modules.drafter, Drawn(rows, anchors, jnp.ones(len(anchors), bool)))


def test_a_block_sees_nothing_at_or_after_its_anchor_but_the_anchor_token(
    params: dict, continuations: Continuations
) -> None:
    rows = take_rows(continuations, jnp.asarray([0]))
    before = draft(params, rows, [[9, 15]])
    later = dataclasses.replace(rows, tokens=rows.tokens.at[0, 10:].set(5))
    np.testing.assert_array_equal(draft(params, later, [[9, 9]])[:, 0], before[:, 0])
    earlier = dataclasses.replace(rows, tokens=rows.tokens.at[0, 8].set(5))
    assert bool((draft(params, earlier, [[9, 15]])[:, 0] != before[:, 0]).any())


def test_blocks_in_training_are_blocks_in_decoding(params: dict, continuations: Continuations) -> None:
    rows, anchors = take_rows(continuations, jnp.asarray([0, 4])), [9, 17]
    trained = draft(params, rows, [[anchors[0], 12], [anchors[1], 8]])[:, 0]
    lengths, models = jnp.asarray(anchors), Models(TARGET, DRAFTER)
    state = empty_state(
        DecodePlan(models, "chain", 3, sample=False),
        capacity=32,
        limit=jnp.ones(2, jnp.int32),
        temperature=jnp.zeros(2),
        seed=jnp.zeros(2, jnp.int32),
        stop_ids=jnp.zeros(0, jnp.int32),
        dtype=F32,
    )
    tokens = rows.tokens.astype(jnp.int32)
    state = jax.jit(prefill_piece)(params, state, tokens, jnp.arange(24) < lengths[:, None])
    roots = jnp.take_along_axis(tokens, lengths[:, None], axis=1)
    block = jnp.concatenate([roots, jnp.full((2, DRAFTER.depth), DRAFTER.mask_token_id)], axis=1)
    modules = bind(models, params)
    decoded = jax.jit(modules.drafter.draft)(modules.target.embed(block), lengths, state.drafter)[:, 1:]
    np.testing.assert_allclose(modules.target.logits(trained), modules.target.logits(decoded), atol=2e-5)


def test_an_untrained_weaver_keeps_the_marginals(params: dict, continuations: Continuations) -> None:
    modules = bind(Models(TARGET, DRAFTER, TRIO.weaver), params)
    rows = take_rows(continuations, jnp.asarray([0, 2]))
    drafted = run_blocks(params, rows, [[9], [11]])
    pool = top_pool(modules.target.logits(drafted.hidden), 8)
    np.testing.assert_array_equal(weaver_logits(modules.target, modules.weaver, drafted, pool), pool.scores)


def test_draft_targets_are_the_true_path_and_end_with_the_row(params: dict, continuations: Continuations) -> None:
    modules = bind(Models(TARGET, DRAFTER), params)
    rows = take_rows(continuations, jnp.asarray([3]))  # 11 tokens
    drafted = run_blocks(params, rows, [[9, 8]])
    text = np.asarray(rows.tokens[0])
    np.testing.assert_array_equal(drafted.tokens[0, 1], text[8:11])
    np.testing.assert_array_equal(drafted.targets.tokens[0, 1, :2], text[9:11])
    np.testing.assert_array_equal(drafted.targets.valid[0], [[True, False, False], [True, True, False]])
    whole = jax.jit(modules.target.sequence)(jnp.asarray(text[None], jnp.int32), jnp.arange(24)[None] < 11)
    np.testing.assert_allclose(drafted.feature[0, 1], whole.hidden[0, 7], atol=1e-5)
    np.testing.assert_allclose(
        drafted.targets.logits[0, 1, :2], modules.target.logits(whole.hidden[0, 8:10]), atol=1e-5
    )


def test_bits_per_character_counts_every_token_once(params: dict) -> None:
    network, text = target_network(TARGET, F32), np.arange(20, 41).astype(np.uint16)
    figures = bits_per_character(network, text, 50, batch=2, length=8)(params["target"])
    target = network.bind(params["target"])
    padded = np.concatenate([np.zeros(5, int), text, np.zeros(8, int)])
    sequence = jax.jit(target.sequence)
    total = 0.0
    for place in range(len(text)):
        start = place // 4 * 4  # of the window whose second half holds the token
        window = jnp.asarray(padded[None, start : start + 9])
        logits = target.logits(sequence(window[:, :-1], jnp.ones((1, 8), bool)).hidden)
        total += float(token_losses(logits, window[:, 1:])[0, place - start + 4])
    np.testing.assert_allclose(figures["nats_a_token"], total / 21, rtol=1e-5)
    np.testing.assert_allclose(figures["bits_per_character"], total / np.log(2.0) / 50, rtol=1e-5)


def test_demo_trio_fits_its_size() -> None:
    trio, sizes = demo_trio(), []
    for build in (
        target_network(trio.target, F32),
        drafter_network(trio.drafter, F32),
        weaver_network(trio.weaver, F32),
    ):
        shapes = nnx.eval_shape(lambda build=build: build.build(dtype=F32, rngs=nnx.Rngs(0)))
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(nnx.state(shapes))))
    assert 23.0e6 < sum(sizes) < 23.5e6
