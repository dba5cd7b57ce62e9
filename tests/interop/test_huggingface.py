"""The exported model in `transformers`: every weight finds its place, and both heads give the same logits."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import helpers, sources

from bert_jax.inference.pretrained import load
from bert_jax.interop import huggingface
from bert_jax.interop.importing import import_checkpoint
from bert_jax.model.bert import HEADS
from bert_jax.training.checkpoints import Checkpoint, open_checkpoint
from bert_jax.training.pretrain import pretrain

torch = pytest.importorskip("torch", reason="needs the parity extra: torch and transformers")
transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")


FEW_STEPS = {"optimizer__learning_rate": 0.05, "optimizer__warmup_steps": 1, "total_steps": 3, "eval_batches": 1}


@pytest.fixture(scope="module")
def exported(dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(workdir, exported folder) of a model after a few steps, so that no parameter is where it began."""
    folder = tmp_path_factory.mktemp("exported")
    pretrain(helpers.small_config(dataset_dir, **FEW_STEPS), str(folder / "run"))
    huggingface.export(open_checkpoint(str(folder / "run")), str(folder / "hf"))
    return folder / "run", folder / "hf"


def load_torch(folder: Path):
    model, info = transformers.BertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info  # no missing, unexpected or misshapen key
    return model.eval()


def assert_comes_back(folder: Path, checkpoint: Checkpoint) -> None:
    """An imported checkpoint equals the exported one, without the heads that no objective trained."""
    back = import_checkpoint(str(folder), str(folder.with_name("back")))
    assert back.bert_config == checkpoint.bert_config
    assert back.tokenizer.sha256 == checkpoint.tokenizer.sha256
    kept = ("embeddings", "encoder", *back.heads)
    sources.assert_same_parameters(
        back.load_parameters(), {part: value for part, value in checkpoint.load_parameters().items() if part in kept}
    )


def test_a_trained_model_comes_back(exported: tuple[Path, Path]):
    workdir, folder = exported
    checkpoint = open_checkpoint(str(workdir))
    assert_comes_back(folder, checkpoint)
    assert open_checkpoint(str(folder.with_name("back"))).heads == checkpoint.heads == HEADS


def test_both_heads_give_the_same_logits_for_a_text(exported: tuple[Path, Path]):
    workdir, folder = exported
    pretrained, model = load(str(workdir)), load_torch(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    first, second = "the ship sees the [MASK] .", "a little storm near the harbour ."
    encoded = tokenizer(first, second, return_tensors="pt")
    ids, token_type_ids = pretrained.tokenizer.encode_with_special_tokens(first, second)
    assert encoded["input_ids"][0].tolist() == ids
    assert encoded["token_type_ids"][0].tolist() == token_type_ids
    mlm, nsp = jax.jit(lambda batch: pretrained.model(batch))(pretrained.batch(first, second))
    with torch.no_grad():
        expected = model(**encoded)
    vocabulary = pretrained.config.vocab_size
    np.testing.assert_allclose(mlm[:, :, :vocabulary], expected.prediction_logits, atol=1e-4)
    np.testing.assert_allclose(nsp[:, 0], expected.seq_relationship_logits, atol=1e-4)


@pytest.mark.parametrize("hidden_act", [pytest.param("gelu", marks=pytest.mark.long), "gelu_new"])
def test_padded_batches_and_both_gelus(hidden_act: str, vocabulary: list[str], tmp_path: Path):
    sources.write_source(tmp_path / "hf", vocabulary, num_hidden_layers=3, hidden_act=hidden_act)
    pretrained, model = load(str(tmp_path / "hf-checkpoint")), load_torch(tmp_path / "hf")
    config = pretrained.config
    rng = np.random.default_rng(0)
    lengths = np.array([20, 13, 7])
    ids = rng.integers(0, config.vocab_size, (3, 20))
    real = np.arange(20) < lengths[:, None]
    types = rng.integers(0, 2, (3, 20))
    positions = np.stack([rng.permutation(7)[:4] for _ in range(3)])
    batch = {
        "input_ids": ids, "token_type_ids": types, "positions": np.tile(np.arange(20), (3, 1)),
        "sequence_ids": real.astype(np.int32), "masked_positions": positions,
        "cls_positions": np.zeros((3, 1), np.int32),
    }  # fmt: skip
    mlm, nsp = jax.jit(lambda batch: pretrained.model(batch))(jax.tree.map(jnp.asarray, batch))
    with torch.no_grad():
        expected = model(
            input_ids=torch.tensor(ids), token_type_ids=torch.tensor(types), attention_mask=torch.tensor(real)
        )
    logits = np.take_along_axis(expected.prediction_logits.numpy(), positions[..., None], 1)
    np.testing.assert_allclose(mlm[..., : config.vocab_size], logits, atol=1e-4)
    np.testing.assert_allclose(nsp[:, 0], expected.seq_relationship_logits, atol=1e-4)


def test_the_fill_mask_pipeline_agrees(exported: tuple[Path, Path]):
    from bert_jax.inference.pretrained import fill_mask

    workdir, folder = exported
    text = "the ship follows a [MASK] near the island ."
    pipeline = transformers.pipeline("fill-mask", model=str(folder), tokenizer=str(folder))
    expected = pipeline(text, top_k=5)
    ours = fill_mask(load(str(workdir)), text, top=5)[0]
    assert [filling.token for filling in ours] == [entry["token_str"] for entry in expected]
    np.testing.assert_allclose([f.probability for f in ours], [e["score"] for e in expected], rtol=1e-3)


def test_a_left_to_right_model_is_exported_as_one_and_comes_back(dataset_dir: Path, tmp_path: Path):
    config = helpers.small_config(dataset_dir, objective__lm="ltr", objective__nsp=False, **FEW_STEPS)
    pretrain(config, str(tmp_path / "run"))
    checkpoint = open_checkpoint(str(tmp_path / "run"))
    assert huggingface.export(checkpoint, str(tmp_path / "hf")) == "BertLMHeadModel"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(model).__name__ == "BertLMHeadModel"
    assert not any(info.values()), info
    ours = load(str(tmp_path / "run"))
    batch = ours.batch("the ship sees the moon .")
    logits, _ = jax.jit(lambda batch: ours.model(batch))(batch)
    ids = torch.tensor(np.asarray(batch["input_ids"]))
    with torch.no_grad():
        expected, cut = model.eval()(input_ids=ids).logits, model(input_ids=ids[:, :4]).logits
    np.testing.assert_allclose(logits[:, :, : ours.config.vocab_size], expected, atol=1e-5)
    np.testing.assert_allclose(expected[:, :4], cut, atol=1e-5)  # it is left-to-right there too

    assert_comes_back(tmp_path / "hf", checkpoint)
    assert open_checkpoint(str(tmp_path / "back")).heads == ("mlm_head",)
