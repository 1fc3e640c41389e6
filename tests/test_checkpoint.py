"""The format of converted checkpoints: what is written comes back bit for bit; nothing unfinished or damaged loads."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from tfm_jax._checkpoint_layout import drafter_shapes, flatten, nest, target_shapes, weaver_shapes
from tfm_jax.checkpoint import (
    CheckpointConfig,
    CheckpointWriter,
    Dtype,
    expected_pieces,
    load_checkpoint,
    read_config,
    save_checkpoint,
)
from tfm_jax.config import DrafterConfig, TargetConfig, WeaverConfig
from tfm_jax.dflash import Drafter
from tfm_jax.errors import TfmError
from tfm_jax.target import Target
from tfm_jax.weaver import Weaver

HYBRID = TargetConfig(
    family="qwen3_5",
    vocab_size=40,
    hidden_size=12,
    intermediate_size=20,
    layer_types=("linear_attention", "full_attention"),
    heads=4,
    kv_heads=2,
    head_dim=8,
    rotary_dim=2,
    rope_theta=1e7,
    norm_eps=1e-6,
    tied_embeddings=False,
    max_positions=64,
    key_heads=2,
    value_heads=6,
    key_dim=4,
    value_dim=10,
    conv_width=4,
)
DENSE = TargetConfig(
    family="qwen3",
    vocab_size=40,
    hidden_size=12,
    intermediate_size=20,
    layer_types=("full_attention",),
    heads=4,
    kv_heads=2,
    head_dim=8,
    rotary_dim=8,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=64,
)
DRAFTER = DrafterConfig(
    vocab_size=40,
    hidden_size=12,
    intermediate_size=22,
    layer_causal=(True, False),
    layer_windows=(5, 0),
    heads=3,
    kv_heads=1,
    head_dim=6,
    rope_theta=1e7,
    norm_eps=1e-6,
    block_size=8,
    mask_token_id=39,
    target_layers=(0, 1),
    max_positions=64,
)
W1 = WeaverConfig(
    generation="w1",
    hidden_size=12,
    embed_size=12,
    rank=6,
    layers=2,
    heads=2,
    mlp_size=10,
    max_depth=7,
    pool_size=5,
)
W2 = WeaverConfig(
    generation="w2",
    hidden_size=12,
    embed_size=12,
    rank=8,
    layers=1,
    heads=2,
    mlp_size=10,
    max_depth=7,
    pool_size=5,
    rope_base=500.0,
)
TRIO = CheckpointConfig(HYBRID, DRAFTER, W1, stop_token_ids=(3, 38), source={"target": "tiny"})
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
RECURRENCE = ("layers.0.mixer.A_log", "layers.0.mixer.dt_bias", "layers.0.mixer.norm.scale")


def random_trees(config: CheckpointConfig) -> dict[str, dict]:
    rng = np.random.default_rng(0)
    shapes = {"target": target_shapes(config.target)}
    shapes |= {"drafter": drafter_shapes(config.drafter)} if config.drafter else {}
    shapes |= {"weaver": weaver_shapes(config.weaver)} if config.weaver else {}
    return {
        model: nest({path: rng.standard_normal(shape, np.float32) for path, shape in arrays.items()})
        for model, arrays in shapes.items()
    }


def array_files(directory: Path) -> dict[str, bytes]:
    """Every file but Orbax's own, which holds the time."""
    files = (file for file in directory.rglob("*") if file.is_file() and file.name != "_CHECKPOINT_METADATA")
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "out"
    save_checkpoint(out, TRIO, random_trees(TRIO), dtype="bfloat16")
    return out


@pytest.fixture
def out(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(saved, tmp_path / "out")


@pytest.mark.parametrize(
    ("module", "config", "shapes"),
    [
        (Target, HYBRID, target_shapes),
        (Target, DENSE, target_shapes),
        (Drafter, DRAFTER, drafter_shapes),
        (Weaver, W1, weaver_shapes),
        (Weaver, W2, weaver_shapes),
    ],
    ids=["hybrid", "dense", "drafter", "w1", "w2"],
)
def test_layout_is_that_of_the_modules(
    module: Callable[..., nnx.Module], config: TargetConfig | DrafterConfig | WeaverConfig, shapes: Callable
) -> None:
    abstract = nnx.eval_shape(lambda: module(config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)))
    parameters = nnx.to_pure_dict(nnx.state(abstract, nnx.Param))
    assert shapes(config) == {path: leaf.shape for path, leaf in flatten(parameters).items()}


def test_round_trip_keeps_every_bit_and_the_config(tmp_path: Path) -> None:
    trees = random_trees(TRIO)
    (tmp_path / "tokenizer.json").write_text("{}")
    save_checkpoint(tmp_path / "out", TRIO, trees, tokenizer=tmp_path / "tokenizer.json")
    loaded = load_checkpoint(tmp_path / "out")
    assert loaded.config == TRIO
    assert loaded.tokenizer_path == tmp_path / "out" / "tokenizer.json"
    for model, tree in trees.items():
        restored = getattr(loaded, model)
        assert jax.tree.structure(restored) == jax.tree.structure(tree)
        for path, array in flatten(tree).items():
            np.testing.assert_array_equal(np.asarray(flatten(restored)[path]), array, err_msg=f"{model}: {path}")


def test_absent_models_load_as_none(tmp_path: Path) -> None:
    config = CheckpointConfig(DENSE)
    save_checkpoint(tmp_path / "out", config, random_trees(config))
    loaded = load_checkpoint(tmp_path / "out")
    assert (loaded.drafter, loaded.weaver, loaded.tokenizer_path) == (None, None, None)
    assert "lm_head" not in loaded.target


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_dtype_spares_the_recurrence(saved: Path, dtype: Dtype | None) -> None:
    loaded = load_checkpoint(saved, dtype)
    source = random_trees(TRIO)
    for model in ("target", "drafter", "weaver"):
        for path, array in flatten(getattr(loaded, model)).items():
            exact = flatten(source[model])[path]
            if model == "target" and path in RECURRENCE:
                assert array.dtype == jnp.float32
                np.testing.assert_array_equal(array, exact)
            else:
                assert array.dtype == jnp.dtype(dtype or "bfloat16"), path
                np.testing.assert_array_equal(array.astype(jnp.bfloat16), exact.astype(jnp.bfloat16))


def test_files_repeat_byte_for_byte_and_name_no_place(saved: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "again", TRIO, random_trees(TRIO), dtype="bfloat16")
    first = array_files(saved)
    assert first == array_files(tmp_path / "again")
    assert not [name for name, content in first.items() if str(saved.parent).encode() in content]


def test_files_are_orbax_s_own(saved: Path, tmp_path: Path) -> None:
    """Orbax restores the values from our files, and writes the same bytes, in every piece."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, use_compression=False)
    with ocp.Checkpointer(handler) as orbax:
        for name in expected_pieces(TRIO):
            restored = orbax.restore(saved / name)
            for path, array in flatten(restored).items():
                stored = (saved / name / path).glob("c/**/0")
                content = next(file for file in stored if file.is_file()).read_bytes()
                assert content[:-20] == np.asarray(array).tobytes()
            orbax.save(tmp_path / "theirs", restored)
            theirs, ours = array_files(tmp_path / "theirs"), array_files(saved / name)
            theirs.pop("commit_success.txt", None)  # names the directory of the run
            assert {path: text.replace(b"jax.Array", b"np.ndarray") for path, text in theirs.items()} == ours
            shutil.rmtree(tmp_path / "theirs")


def test_every_array_lies_as_asked_for_on_eight_devices(saved: Path, tmp_path: Path) -> None:
    """A mesh of 2 × 4, in two dtypes, split and replicated; a model that lies on all devices says the same."""
    config = CheckpointConfig(DENSE)
    save_checkpoint(tmp_path / "dense", config, random_trees(config))
    program = Path(__file__).with_name("sharded_loading.py")
    run = subprocess.run(
        [sys.executable, program, saved, tmp_path / "dense"], check=True, stdout=subprocess.PIPE, env=ENVIRONMENT
    )
    result = json.loads(run.stdout)
    assert result["exact"] == 2 * sum(len(arrays) for arrays in expected_pieces(TRIO).values())
    assert result["split"] > 0
    first, second = result["tokens"]
    assert len(first) == 8
    assert first == second


def test_a_bfloat16_model_is_loaded_without_a_copy(saved: Path) -> None:
    """A CPU device keeps the pages of the files themselves."""
    loaded = load_checkpoint(saved)
    kernel = loaded.target["layers"][0]["mlp"]["down"]["kernel"]
    file = saved / "target/layers.0/mlp.down.kernel/c/0/0"
    address = kernel.unsafe_buffer_pointer()
    pages = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    assert [line[0] for line in pages if int(line[0].split("-")[0], 16) == address]


def test_leaving_without_finish_leaves_nothing(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", TRIO) as writer:
        writer.write_piece("target/norm", {"scale": np.zeros(12, np.float32)})
        with pytest.raises(TfmError, match=r"has no config\.json"):
            load_checkpoint(tmp_path / "out.partial")
    assert list(tmp_path.iterdir()) == []


def test_finish_wants_every_piece(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", TRIO) as writer, pytest.raises(TfmError, match=r"target/embed_tokens"):
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_remains_of_a_killed_run_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "out.partial" / "target" / "layers.0").mkdir(parents=True)
    save_checkpoint(tmp_path / "out", TRIO, random_trees(TRIO))
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_strange_neighbours_and_full_directories_are_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "out.partial" / "precious"
    precious.mkdir(parents=True)
    with pytest.raises(TfmError, match="was not left by an earlier run"):
        CheckpointWriter(tmp_path / "out", TRIO)
    with pytest.raises(TfmError, match="not an empty directory"):
        CheckpointWriter(tmp_path / "out.partial", TRIO)
    assert precious.is_dir()


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"scale": np.zeros(13, np.float32)}, r"target/norm: scale has shape \(13,\) .* \(12,\)"),
        ({}, r"target/norm lacks the array scale of shape \(12,\)"),
        ({"scale": np.zeros(12, np.float32), "bias": np.zeros(12, np.float32)}, r"unknown array bias of shape \(12,\)"),
    ],
)
def test_writer_checks_shapes(tmp_path: Path, arrays: dict, words: str) -> None:
    with CheckpointWriter(tmp_path / "out", TRIO) as writer, pytest.raises(TfmError, match=words):
        writer.write_piece("target/norm", arrays)


def test_every_parameter_has_one_piece() -> None:
    pieces = expected_pieces(TRIO)
    assert list(pieces)[:4] == ["target/embed_tokens", "target/layers.0", "target/layers.1", "target/norm"]
    count = sum(len(arrays) for arrays in pieces.values())
    assert count == len(target_shapes(HYBRID)) + len(drafter_shapes(DRAFTER)) + len(weaver_shapes(W1))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20])


ARRAY = Path("target/layers.0/mixer.in_proj.kernel")
DAMAGE = {
    "no piece": lambda out: shutil.rmtree(out / "target/layers.0"),
    "no array": lambda out: shutil.rmtree(out / ARRAY),
    "no array header": lambda out: (out / ARRAY / "zarr.json").unlink(),
    "broken array header": lambda out: truncate(out / ARRAY / "zarr.json"),
    "no values": lambda out: (out / ARRAY / "c/0/0").unlink(),
    "truncated values": lambda out: truncate(out / ARRAY / "c/0/0"),
    "no list of arrays": lambda out: (out / "target/layers.0/_METADATA").unlink(),
    "broken list of arrays": lambda out: truncate(out / "target/layers.0/_METADATA"),
    "empty list of arrays": lambda out: (out / "target/layers.0/_METADATA").write_text("{}"),
    "layer of another kind": lambda out: exchange(out / "target/layers.0", out / "target/layers.1"),
}


def exchange(first: Path, second: Path) -> None:
    first.rename(first.with_name("aside"))
    second.rename(first)
    first.with_name("aside").rename(second)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_error_that_names_the_piece(out: Path, damage: str) -> None:
    DAMAGE[damage](out)
    with pytest.raises(TfmError, match=r"out/target/layers\.0"):
        load_checkpoint(out)


def edit_config(out: Path, **changes: object) -> None:
    values = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(values | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "format is 2 but this version reads format 1"),
        ({"target": {"family": "qwen3_5"}}, "TargetConfig lacks the keys"),
        ({"target": HYBRID.to_dict() | {"colour": 1}}, r"TargetConfig does not know the keys \['colour'\]"),
        ({"target": HYBRID.to_dict() | {"heads": "many"}}, "wrong type"),
        (
            {"target": HYBRID.to_dict() | {"intermediate_size": 21}},
            r"down.kernel has shape \(20, 12\) .* \(21, 12\)",
        ),
        ({"target": None}, "wrong type"),
        ({"drafter": DRAFTER.to_dict() | {"vocab_size": 41}}, "vocab_size is 41"),
    ],
)
def test_config_must_be_understood(out: Path, changes: dict, words: str) -> None:
    edit_config(out, **changes)
    with pytest.raises(TfmError, match=words):
        load_checkpoint(out)


def test_what_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(TfmError, match="is not a directory"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(TfmError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(TfmError, match="names no format"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"format": 1')
    with pytest.raises(TfmError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"format": 1}')
    with pytest.raises(TfmError, match="key 'drafter' is missing"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("drafter", "weaver", "words"),
    [
        ({"hidden_size": 24}, {}, "drafter does not fit the target: its hidden_size is 24, the target's is 12"),
        ({"vocab_size": 41}, {}, "its vocab_size is 41"),
        ({"target_layers": (0, 2)}, {}, r"reads the layers \[2\] of a target of 2 layers"),
        ({"mask_token_id": 40}, {}, "mask token 40 is outside the vocabulary of 40"),
        ({}, {"hidden_size": 24}, "Weaver does not fit the target: its hidden_size is 24, not 12"),
        ({}, {"embed_size": 24}, "its embed_size is 24, not 12"),
    ],
)
def test_models_must_fit(drafter: dict, weaver: dict, words: str) -> None:
    with pytest.raises(TfmError, match=words):
        CheckpointConfig(
            HYBRID,
            DrafterConfig.from_dict(DRAFTER.to_dict() | drafter),
            WeaverConfig.from_dict(W1.to_dict() | weaver),
        )


def test_a_weaver_needs_a_drafter_and_stops_lie_in_the_vocabulary() -> None:
    with pytest.raises(TfmError, match="needs the drafter"):
        CheckpointConfig(HYBRID, weaver=W1)
    with pytest.raises(TfmError, match=r"stop_token_ids \[40\]"):
        CheckpointConfig(HYBRID, stop_token_ids=(1, 40))
