"""New words and longer sequences than those of the checkpoint: rows of the tables, meshes, resume and export."""

import logging
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from support import continued, runs

import bert_jax
from bert_jax import cli
from bert_jax.errors import InputError
from bert_jax.model import abstract_parameters
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpoints import Checkpoint, open_checkpoint
from bert_jax.training.pretrain import pretrain

FROZEN = {"optimizer__learning_rate": 0.0, "total_steps": 1, "optimizer__warmup_steps": 0, "eval_at_start": False}


def grown(data: Path, init: Checkpoint, folder: Path, **overrides: object) -> tuple[dict, Checkpoint]:
    """Returns the parameters of a run whose steps change none, on the host, and its checkpoint."""
    pretrain(continued.config(data, init, **{**FROZEN, "eval_batches": 0, **overrides}), str(folder))
    opened = open_checkpoint(str(folder))
    return jax.tree.map(np.asarray, opened.load_parameters()), opened


def assert_extends(new: dict, init: Checkpoint, tokenizer: Tokenizer) -> None:
    """Checks every row of the grown tables, and that all other parameters are those of `init`."""
    old = jax.tree.map(np.asarray, init.load_parameters())
    count = init.tokenizer.vocab_size
    for part, name in (("embeddings", "word"), ("mlm_head", "output_bias")):
        before, after = old[part].pop(name), new[part].pop(name)
        np.testing.assert_array_equal(after[:count], before[:count])
        for index in range(count, tokenizer.vocab_size):
            (pieces,) = init.tokenizer.encode_batch([tokenizer.vocab[index]])
            assert len(pieces) > 1
            np.testing.assert_allclose(after[index], before[pieces].mean(axis=0), rtol=1e-5, atol=1e-7)
        assert not after[tokenizer.vocab_size :].any()
    jax.tree.map(np.testing.assert_array_equal, new, old)


def test_new_words_start_as_the_means_of_their_pieces(
    extended_domain: Path, init: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, "bert_jax"):
        parameters, opened = grown(extended_domain, init, tmp_path)
    assert opened.bert_config.vocab_size == init.bert_config.vocab_size + len(continued.NEW_WORDS)
    assert opened.tokenizer.vocab[-len(continued.NEW_WORDS) :] == tuple(continued.NEW_WORDS)
    assert_extends(parameters, init, opened.tokenizer)
    assert any(f"{len(continued.NEW_WORDS)} new words" in message for message in caplog.messages)


@pytest.mark.usefixtures("all_devices")
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"mesh__fsdp": 2, "mesh__tensor": 4}, marks=pytest.mark.long),
        pytest.param({"mesh__data": 4, "mesh__tensor": 2, "mesh__zero1": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_tables_grow_on_a_mesh(mesh: dict, vocabulary: list[str], tmp_path: Path):
    """The padded table grows from 128 rows to 256 as well, so that every shard has other rows than before."""
    more = [f"zz{number}" for number in range(128 - len(vocabulary))]
    init = continued.write_init(tmp_path / "init", [*vocabulary, *more])
    assert init.bert_config.padded_vocab_size == 128
    data = continued.write_domain(tmp_path / "domain", [*vocabulary, *more], extended=True, seq_len=128)
    parameters, opened = grown(data, init, tmp_path / "run", **mesh)
    assert opened.bert_config.padded_vocab_size == 256
    position = parameters["embeddings"].pop("position")
    before = np.asarray(init.load_parameters()["embeddings"]["position"])
    np.testing.assert_array_equal(position, np.concatenate([before, before]))
    parameters["embeddings"]["position"] = before
    assert_extends(parameters, init, opened.tokenizer)


def test_logits_of_old_pieces_do_not_change(extended_domain: Path, init: Checkpoint, tmp_path: Path):
    _, opened = grown(extended_domain, init, tmp_path / "run")
    old, new = (bert_jax.load(str(one.path)) for one in (init, opened))
    count = old.tokenizer.vocab_size
    assert new.tokenizer.vocab[:count] == old.tokenizer.vocab
    batch = old.batch(["the ship sees the storm .", "the owl ."])
    before, after = (np.asarray(model.model(batch)[0]) for model in (old, new))
    np.testing.assert_allclose(after[..., :count], before[..., :count], rtol=1e-5, atol=1e-5)
    assert np.ptp(before[..., :count], axis=-1).min() > 0.5


@pytest.mark.parametrize("seq_len", [pytest.param(32, marks=pytest.mark.long), 128])
def test_positions_are_extended_for_longer_sequences_alone(
    seq_len: int, init: Checkpoint, vocabulary: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    data = continued.write_domain(tmp_path / "domain", vocabulary, seq_len=seq_len)
    with caplog.at_level(logging.INFO, "bert_jax"):
        parameters, opened = grown(data, init, tmp_path / "run")
    before = np.asarray(init.load_parameters()["embeddings"]["position"])
    expected = {32: before, 128: np.concatenate([before, before])}[seq_len]
    np.testing.assert_array_equal(parameters["embeddings"]["position"], expected)
    assert opened.bert_config.max_position_embeddings == max(64, seq_len)
    assert any("positions 64 to 127" in message for message in caplog.messages) == (seq_len == 128)


@pytest.mark.long
def test_positions_are_those_of_the_longest_phase(
    init: Checkpoint, domain: Path, vocabulary: list[str], tmp_path: Path
):
    long = continued.write_domain(tmp_path / "domain", vocabulary, seq_len=96)
    phases = ({"steps": 1, "data.path": str(domain)}, {"steps": -1, "data.path": str(long)})
    _, opened = grown(domain, init, tmp_path / "run", phases=phases, total_steps=2)
    assert opened.bert_config.max_position_embeddings == 96


def test_a_killed_run_resumes_without_growing_again(
    extended_domain: Path, init: Checkpoint, vocabulary: list[str], tmp_path: Path
):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    pretrain(continued.config(extended_domain, init, total_steps=4), str(whole))
    moved = continued.write_init(tmp_path / "moved", vocabulary)
    pretrain(continued.config(extended_domain, moved, total_steps=4), str(resumed))
    runs.assert_same_run(whole, resumed)
    (resumed / "checkpoints" / "4").rename(tmp_path / "later")  # as if it was killed after step 2
    (tmp_path / "moved").rename(tmp_path / "gone")
    pretrain(continued.config(extended_domain, moved, total_steps=4), str(resumed))
    runs.assert_same_run(whole, resumed)


def test_a_vocabulary_that_is_no_extension_is_refused(vocabulary: list[str], init: Checkpoint, tmp_path: Path):
    other = [*vocabulary[:-2], vocabulary[-1], vocabulary[-2]]
    data = continued.write_domain(tmp_path / "domain", other, extended=True)
    with pytest.raises(InputError, match=f"{data} .*{init.path}"):
        pretrain(continued.config(data, init), str(tmp_path / "run"))


def test_the_exported_model_is_that_of_the_run(init: Checkpoint, vocabulary: list[str], tmp_path: Path):
    torch = pytest.importorskip("torch", reason="needs the parity extra: torch and transformers")
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")
    data = continued.write_domain(tmp_path / "domain", vocabulary, extended=True, seq_len=96)
    pretrain(continued.config(data, init, total_steps=2), str(tmp_path / "run"))
    assert cli.main(["export", "--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "hf")]) == 0
    opened = open_checkpoint(str(tmp_path / "run"))
    model = transformers.BertForPreTraining.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert model.config.max_position_embeddings == 96
    assert model.config.vocab_size == len(tokenizer) == opened.tokenizer.vocab_size
    text = "the shipwreck near the moonlit harbour sees the sailora ."
    ids, types = opened.tokenizer.encode_with_special_tokens(text)
    assert tokenizer(text)["input_ids"] == ids
    assert {"shipwreck", "moonlit", "sailora"} <= {opened.tokenizer.vocab[index] for index in ids}
    graph, _, _ = abstract_parameters(opened.bert_config)
    row = np.array([ids], np.int32)
    places = np.arange(row.shape[1], dtype=np.int32)[None]
    batch = {
        "input_ids": row, "token_type_ids": np.array([types], np.int32), "positions": places,
        "sequence_ids": np.ones_like(row), "masked_positions": places, "cls_positions": np.zeros((1, 1), np.int32),
    }  # fmt: skip
    ours, _ = jax.jit(lambda parameters: nnx.merge(graph, parameters)(batch))(opened.load_parameters())
    with torch.no_grad():
        theirs = model(torch.tensor(row.astype(np.int64))).prediction_logits.numpy()
    np.testing.assert_allclose(np.asarray(ours)[..., : len(tokenizer)], theirs, rtol=1e-3, atol=1e-3)
