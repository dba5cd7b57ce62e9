"""The feature-based approach: what is taken of a frozen encoder's layers, and runs that leave the encoder as it is."""

import json
import random
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx
from support import helpers, sources

from bert_jax.cli import main
from bert_jax.config import FinetuneConfig
from bert_jax.config_keys import Features
from bert_jax.errors import InputError
from bert_jax.finetuning.finetune import finetune
from bert_jax.finetuning.run import plan_step
from bert_jax.inference import features
from bert_jax.model import BertConfig, abstract_parameters, initialize
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.parallel.mesh import make_mesh
from bert_jax.training.checkpoints import open_checkpoint, save_parameters

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 5}
WAYS = get_args(Features)[1:]
TEXT = "the ship sees the storm near a little tower ."
SETTINGS = {
    "num_epochs": 2, "global_batch_size": 8, "log_every_steps": 1, "task.max_seq_len": 32, "head.bilstm": 8,
    "checkpoint.every_steps": 5, "checkpoint.keep": 2, "optimizer.warmup_proportion": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def encoder(vocabulary: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers of random weights, LayerNorms and biases among them."""
    folder = tmp_path_factory.mktemp("encoder") / "encoder"
    sources.write_checkpoint(folder, vocabulary, **SIZES)
    return folder


@pytest.fixture(scope="module")
def left_to_right(vocabulary: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("left_to_right") / "encoder"
    sources.write_checkpoint(folder, vocabulary, is_decoder=True, **SIZES)
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words of the sea are entities; and sentences that are about the sea or not."""
    folder, rng = tmp_path_factory.mktemp("task"), random.Random(0)
    for name, count in (("train", 24), ("dev", 8)):
        conll, texts = [], ["text,label"]
        for _ in range(count):
            label = rng.choice(["sea", "town"])
            words = [rng.choice(helpers.TOPICS[label] + helpers.SMALL_WORDS[:4]) for _ in range(rng.randint(4, 9))]
            conll += [f"{word} {'B-SEA' if word in helpers.TOPICS['sea'] else 'O'}" for word in words] + [""]
            texts.append(f"{' '.join(words)},{label}")
        (folder / f"{name}.conll").write_text("\n".join(conll) + "\n")
        (folder / f"{name}.csv").write_text("\n".join(texts) + "\n")
    return folder


def config_of(name: str, encoder: Path, task: Path, **overrides: object) -> FinetuneConfig:
    files = {"task.train": "train.csv", "task.dev": "dev.csv"} if name == "text" else {}
    return helpers.finetune_config(name, {**SETTINGS, **files, "init": encoder, "data.path": task}, **overrides)


def build(encoder: Path, head: TaskHead) -> BertForTask:
    """The encoder with a new head; a mix has weights that differ."""
    found = open_checkpoint(str(encoder))
    graph, shapes, _ = abstract_parameters(found.bert_config, build=BertForTask, head=head)
    rng = np.random.default_rng(1)
    parameters = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), leaf.dtype), shapes)
    loaded = found.load_parameters()
    parameters |= {part: loaded[part] for part in ("embeddings", "encoder")}
    if "mix" in parameters:
        parameters["mix"] = {"weights": mix_weights(parameters["mix"]["weights"].size), "scale": jnp.float32(1.5)}
    return nnx.merge(graph, parameters)


def mix_weights(layers: int) -> jax.Array:
    return jnp.arange(layers, dtype=jnp.float32) / 2


def batch_of(encoder: Path, *texts: str, position: int = 2) -> dict[str, np.ndarray]:
    """Rows that end in padding, pooled at `position`."""
    tokenizer = open_checkpoint(str(encoder)).tokenizer
    rows = [tokenizer.encode_with_special_tokens(text)[0] for text in texts or (TEXT,)]
    length = max(map(len, rows)) + 1
    ids = np.array([[*row, *[tokenizer.pad_id] * (length - len(row))] for row in rows])
    positions = np.tile(np.arange(length), (len(rows), 1))
    return {
        "input_ids": ids, "token_type_ids": np.zeros_like(ids), "positions": positions,
        "sequence_ids": (positions < [[len(row)] for row in rows]).astype(np.int32),
        "cls_positions": np.full((len(rows), 1), position),
    }  # fmt: skip


def encode(model: BertForTask, batch: dict[str, np.ndarray]) -> np.ndarray:
    """The features of the one row of a batch, without padding."""
    return np.asarray(jax.jit(lambda batch: model.features(batch))(batch))[0, :-1]


def by_hand(way: str, hidden: np.ndarray) -> np.ndarray:
    """Features [T, ...] of hidden states [layers + 1, T, D], the embeddings first."""

    def mixed(some: np.ndarray) -> np.ndarray:
        shares = np.exp(np.asarray(mix_weights(len(some))))
        return 1.5 * np.tensordot(shares / shares.sum(), some, axes=1)

    last_first = hidden[:0:-1]
    return {
        "embeddings": lambda: hidden[0],
        "second_to_last": lambda: hidden[-2],
        "last": lambda: hidden[-1],
        "sum_last_four": lambda: mixed(last_first[:4]),
        "concat_last_four": lambda: np.concatenate([hidden[-1], hidden[-2], hidden[-3], hidden[-4]], axis=-1),
        "sum_all": lambda: mixed(hidden[1:]),
    }[way]()


@pytest.fixture(scope="module")
def extracted(encoder: Path, left_to_right: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, np.ndarray]:
    """Returns the hidden states of TEXT from `bert-jax features`."""
    folder = tmp_path_factory.mktemp("extracted")
    (folder / "lines.txt").write_text(TEXT + "\n")
    found = {}
    for checkpoint in (encoder, left_to_right):
        output = folder / f"{len(found)}.npz"
        features.extract(str(checkpoint), str(folder / "lines.txt"), str(output), layers="embeddings,all")
        found[checkpoint] = np.load(output)["values"].swapaxes(0, 1)
    return found


@pytest.mark.parametrize(
    ("checkpoint", "way"),
    [
        *(("encoder", way) for way in WAYS),
        *(pytest.param("left_to_right", way, marks=[pytest.mark.long] * (way != "second_to_last")) for way in WAYS),
    ],
)
def test_features_are_those_that_the_command_extracts(way, checkpoint, extracted, request: pytest.FixtureRequest):
    folder = request.getfixturevalue(checkpoint)
    model = build(folder, TaskHead("tag", 3, features=way))
    expected = by_hand(way, extracted[folder])
    got = encode(model, batch_of(folder))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert got.shape[-1] == (64 if way == "concat_last_four" else 16)
    assert np.abs(expected).max() > 0.1


def test_a_new_mix_is_the_mean(encoder: Path, extracted):
    head = TaskHead("tag", 3, features="sum_all")
    config = open_checkpoint(str(encoder)).bert_config
    mix = jax.jit(lambda key: initialize(config, key, build=BertForTask, head=head)[1]["mix"])(jax.random.key(0))
    model = build(encoder, head)
    model.mix.weights[...], model.mix.scale[...] = mix["weights"], mix["scale"]
    got = encode(model, batch_of(encoder))
    np.testing.assert_allclose(got, extracted[encoder][1:].mean(axis=0), atol=2e-5)


@pytest.mark.parametrize("way", ["last", "concat_last_four"])
def test_without_a_bilstm_a_sequence_is_the_features_at_its_position(way, left_to_right: Path, extracted):
    model = build(left_to_right, TaskHead("classify", 3, features=way))
    assert model.pooler is None
    expected = by_hand(way, extracted[left_to_right])[2] @ np.asarray(model.output.kernel[...]) + model.output.bias[...]
    got = jax.jit(lambda batch: model(batch))(batch_of(left_to_right))
    np.testing.assert_allclose(got[0], expected, atol=2e-5)


@pytest.mark.parametrize(("way", "bilstm"), [("embeddings", 0), ("second_to_last", 4)])
def test_there_is_no_dropout_but_the_heads(way, bilstm, encoder: Path):
    batch, key = batch_of(encoder), jax.random.key(5)
    for dropout in (0.0, 0.5):
        layers = 2 if bilstm else 1
        model = build(encoder, TaskHead("tag", 3, dropout, bilstm=bilstm, bilstm_layers=layers, features=way))
        with_key, without = jax.jit(lambda key, model=model: (model(batch, key), model(batch)))(key)
        assert np.array_equal(with_key, without) == (dropout == 0.0)


@pytest.fixture(scope="module")
def run(encoder: Path, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, with checkpoints of two."""
    workdir = tmp_path_factory.mktemp("run")
    finetune(config_of("ner_features:sum_last_four", encoder, task), str(workdir))
    return workdir


def parameters_of(checkpoint: Path) -> dict:
    found = open_checkpoint(str(checkpoint))
    head = TaskHead.from_dict(found.task)
    return jax.device_get(found.load_parameters(build=BertForTask, head=head))


def test_the_encoder_stays_as_it_was_and_all_else_moves(run: Path, encoder: Path):
    before, after = open_checkpoint(str(encoder)).load_parameters(), parameters_of(run)
    for part in ("embeddings", "encoder"):
        sources.assert_same_parameters(after[part], before[part])
    earlier = parameters_of(run / "checkpoints" / "5")
    trained = {part for part in after if part not in ("embeddings", "encoder")}
    assert trained == {"mix", "bilstm", "output"}
    for part in trained:
        for old, new in zip(jax.tree.leaves(earlier[part]), jax.tree.leaves(after[part]), strict=True):
            assert not np.array_equal(old, new), part
    assert after["bilstm"]["above"]["forward"]["input_kernel"].shape == (16, 4, 8)
    assert json.loads((run / "result.json").read_text())["step"] == 6


def test_what_is_frozen_has_no_moments(encoder: Path, task: Path):
    config, model = config_of("ner_features:sum_all", encoder, task), BertConfig(vocab_size=99, **SIZES)
    head = TaskHead("tag", 3, bilstm=8, features="sum_all")
    spec, _ = plan_step(make_mesh(config.mesh), config, model, head, 10)
    assert {"embeddings", "encoder"} < set(spec.abstract.parameters)
    moments = spec.abstract.optimizer_state[1]
    assert set(moments.mu) == set(moments.nu) == {"mix", "bilstm", "output"}


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        ("ner_features:first", {}, r"head\.features.*embeddings, second_to_last"),
        ("ner_features:second_to_last", {}, r"head\.features=second_to_last.*\b2\b.*\b1\b"),
        ("ner_features:concat_last_four", {}, r"head\.features=concat_last_four.*\b4\b.*\b1\b"),
        ("ner_features", {"head__bilstm_layers": 0}, r"head\.bilstm_layers.*\b1\b"),
        ("text", {"head__features": "embeddings", "head__bilstm": 0}, r"head\.features=embeddings.*head\.bilstm"),
        ("ner", {"head__bilstm": 3, "mesh__fsdp": 4}, r"mesh\.fsdp=4"),
    ],
)
@pytest.mark.usefixtures("all_devices")
def test_what_cannot_be_is_refused(config, overrides, message, checkpoint: Path, task: Path, tmp_path: Path):
    with pytest.raises(InputError, match=message):
        finetune(config_of(config, checkpoint, task, **overrides), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_transformers_has_no_such_model(encoder: Path, tmp_path: Path, capsys):
    found, head = open_checkpoint(str(encoder)), TaskHead("tag", 3, features="sum_all")
    parameters = nnx.to_pure_dict(nnx.state(build(encoder, head)))
    save_parameters(
        epath.Path(tmp_path / "model"), parameters, bert_config=found.bert_config, tokenizer=found.tokenizer,
        heads=(), task={**head.to_dict(), "name": "ner"},
    )  # fmt: skip
    assert main(["export", "--checkpoint", str(tmp_path / "model"), "--output", str(tmp_path / "hf")]) == 2
    assert "head.features=sum_all" in capsys.readouterr().err
