"""TensorFlow checkpoints, read: the numbers of `transformers`' torch BERT with the same weights."""

import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from etils import epath
from support import helpers, sources
from support.torch_models import save_torch, torch_outputs

import bert_jax
from bert_jax import cli
from bert_jax.errors import InputError, install_hint
from bert_jax.interop import tensorflow_checkpoints
from bert_jax.interop.importing import import_checkpoint
from bert_jax.model.bert import HEADS
from bert_jax.training.checkpoints import Checkpoint

TEXTS = ["the ship sees the [MASK] .", "a little storm near the harbour .", "the old clock"]
PAIRS = ["the moon hears a ghost .", "star .", "the old clock and the baker of the market ."]
LAYERS, SIZE, HEAD_COUNT = sources.SIZES["num_hidden_layers"], sources.SIZES["hidden_size"], 3

Arrays = dict[str, np.ndarray]
Save = Callable[[Path, Arrays], None]


@pytest.fixture
def save(monkeypatch: pytest.MonkeyPatch) -> Save:
    """Saves variables by name as a checkpoint with a prefix, which a stand-in for TensorFlow reads."""
    saved: dict[str, Arrays] = {}  # by the name of the prefix

    def load_checkpoint(prefix: str) -> SimpleNamespace:
        arrays = saved[Path(prefix).name]
        return SimpleNamespace(
            get_tensor=arrays.__getitem__,
            get_variable_to_dtype_map=lambda: {name: value.dtype for name, value in arrays.items()},
            get_variable_to_shape_map=lambda: {name: list(value.shape) for name, value in arrays.items()},
        )

    def keep(prefix: Path, arrays: Arrays) -> None:
        saved[prefix.name] = arrays
        prefix.with_name(f"{prefix.name}.index").touch()
        prefix.with_name(f"{prefix.name}.data-00000-of-00001").touch()

    assert epath.Path(".").exists()  # etils remembers here whether TensorFlow is installed
    spec = ModuleSpec("tensorflow", None)  # for which transformers looks
    train, errors = SimpleNamespace(load_checkpoint=load_checkpoint), SimpleNamespace(OpError=OSError)
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(train=train, errors=errors, __spec__=spec))
    return keep


@pytest.fixture(scope="module")
def model(vocabulary: list[str], tmp_path_factory: pytest.TempPathFactory):
    """A random BertForPreTraining of torch, with the activation of Google's code."""
    folder = tmp_path_factory.mktemp("torch") / "hf"
    return save_torch(folder, vocabulary, "BertForPreTraining", hidden_act="gelu_new")


def weights(model) -> Arrays:
    return {name: np.ascontiguousarray(value.detach().numpy()) for name, value in model.named_parameters()}


def as_tensorflow(model) -> Arrays:
    """Returns variables as google-research/bert names them, with the slots of its optimizer."""
    arrays: Arrays = {}
    for name, value in weights(model).items():
        if name == "cls.seq_relationship.weight":
            arrays["cls/seq_relationship/output_weights"] = value
            continue
        path = name.replace("encoder.layer.", "encoder.layer_").replace(".", "/")
        path = path.replace("LayerNorm/weight", "LayerNorm/gamma").replace("LayerNorm/bias", "LayerNorm/beta")
        path = path.replace("_embeddings/weight", "_embeddings")
        path = path.replace("cls/predictions/bias", "cls/predictions/output_bias")
        path = path.replace("cls/seq_relationship/bias", "cls/seq_relationship/output_bias")
        is_kernel = path.endswith("/weight")
        arrays[path.replace("/weight", "/kernel")] = np.ascontiguousarray(value.T) if is_kernel else value
    slots = {f"{name}/adam_{slot}": np.zeros_like(value) for name, value in arrays.items() for slot in "mv"}
    return {**arrays, **slots, "global_step": np.int64(28252)}


def write_folder(folder: Path, vocabulary: list[str], **config: object) -> Path:
    """Writes the files beside a checkpoint, as Google released them."""
    folder.mkdir(parents=True)
    sizes = {"vocab_size": len(vocabulary), "hidden_act": "gelu", "pooler_type": "first_token_transform", **config}
    (folder / "bert_config.json").write_text(json.dumps({**sources.SIZES, **sizes}))
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    return folder


def assert_parity(checkpoint: Checkpoint, model) -> None:
    """Checks hidden states, both logits and the pooled states against torch, to 1e-5."""
    bert = bert_jax.load(str(checkpoint.path))
    batch = bert.batch(TEXTS, PAIRS)
    (_, hidden), (mlm, nsp) = jax.jit(
        lambda batch: (bert.model.encode(batch, all_hidden_states=True), bert.model(batch))
    )(batch)
    expected, pooled = torch_outputs(model, batch), torch_outputs(model.bert, batch).pooler_output
    real = np.asarray(batch["sequence_ids"]) > 0
    for ours, theirs in zip(hidden, expected.hidden_states, strict=True):
        np.testing.assert_allclose(ours[real], theirs.numpy()[real], atol=1e-5)
    np.testing.assert_allclose(mlm[real][:, :103], expected.prediction_logits.numpy()[real], atol=1e-5)
    np.testing.assert_allclose(nsp[:, 0], expected.seq_relationship_logits, atol=1e-5)
    np.testing.assert_allclose(bert.model.pooler(hidden[-1], batch["cls_positions"])[:, 0], pooled, atol=1e-5)


@pytest.mark.parametrize("name", ["bert_model.ckpt", "model.ckpt-28252"])
def test_it_has_the_numbers_of_torch(name: str, save: Save, model, vocabulary: list[str], tmp_path: Path):
    folder = write_folder(tmp_path / "uncased_L-2_H-48_A-3", vocabulary)
    save(folder / name, as_tensorflow(model))
    checkpoint = import_checkpoint(str(folder), str(tmp_path / "imported"))
    assert checkpoint.heads == HEADS
    assert checkpoint.tokenizer.lowercase
    assert checkpoint.bert_config.hidden_act == "gelu_new"
    assert_parity(checkpoint, model)


def test_case_of_a_tensorflow_folder(save: Save, model, vocabulary: list[str], tmp_path: Path):
    """It is what the settings say, or what a vocabulary of these pieces has."""
    folder = write_folder(tmp_path / "source", vocabulary)
    save(folder / "bert_model.ckpt", as_tensorflow(model))
    assert bert_jax.load(str(folder)).tokenizer.lowercase
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert not bert_jax.load(str(folder)).tokenizer.lowercase
    assert import_checkpoint(str(folder), str(tmp_path / "imported"), lowercase=True).tokenizer.lowercase


def test_variables_that_do_not_match_are_named(save: Save, model, vocabulary: list[str], tmp_path: Path):
    folder = write_folder(tmp_path / "uncased", vocabulary)
    query, arrays = "bert/encoder/layer_1/attention/self/query/kernel", as_tensorflow(model)
    fine_tuned = {**arrays, "output_weights": np.ones((3, SIZE), np.float32)}
    for variables, message in (
        (fine_tuned, r"unexpected: output_weights \[3, 48\].*--drop"),
        (
            {name: value for name, value in arrays.items() if name != query},
            r"bert\.encoder\.layer\.1\.attention\.self\.q",
        ),
        ({**arrays, query: np.ones((SIZE, 7), np.float32)}, rf"{query} \[7, 48\].*\[48, 48\]"),
        ({"resnet/kernel": np.ones(3, np.float32)}, "num_hidden_layers=2"),
    ):
        save(folder / "model.ckpt-9", variables)
        with pytest.raises(InputError, match=message):
            import_checkpoint(str(folder), str(tmp_path / "imported"))
    save(folder / "model.ckpt-9", fine_tuned)
    checkpoint = import_checkpoint(str(folder), str(tmp_path / "cut"), drop=("output_weights",), layers=(1,))
    assert (checkpoint.heads, checkpoint.bert_config.num_hidden_layers) == (HEADS, 1)
    kernel = checkpoint.load_parameters(parts=("encoder",))["encoder"]["layers"]["feed_forward"]["up_kernel"]
    np.testing.assert_array_equal(kernel[0], weights(model)["bert.encoder.layer.1.intermediate.dense.weight"].T)


def test_a_folder_with_several_checkpoints(save: Save, model, vocabulary: list[str], tmp_path: Path):
    folder = write_folder(tmp_path / "uncased", vocabulary)
    for step in (1, 2):
        save(folder / f"model.ckpt-{step}", as_tensorflow(model))
    with pytest.raises(InputError, match=r"several.*model\.ckpt-2"):
        import_checkpoint(str(folder), str(tmp_path / "imported"))
    for number, name in enumerate(("model.ckpt-1", "model.ckpt-1.index", "model.ckpt-1.data-00000-of-00001")):
        assert import_checkpoint(str(folder / name), str(tmp_path / f"named{number}")).heads == HEADS
    with pytest.raises(InputError, match=r"model\.ckpt-3: no model"):
        import_checkpoint(str(folder / "model.ckpt-3"), str(tmp_path / "missing"))


@pytest.mark.parametrize("place", ["", "bert_model.ckpt"])
def test_a_checkpoint_loads_without_an_import(place: str, save: Save, model, vocabulary: list[str], tmp_path: Path):
    folder = write_folder(tmp_path / "uncased_L-2", vocabulary)
    save(folder / "bert_model.ckpt", as_tensorflow(model))
    import_checkpoint(str(folder), str(tmp_path / "imported"))
    loaded, imported = bert_jax.load(str(folder / place)), bert_jax.load(str(tmp_path / "imported"))
    for text in TEXTS:
        np.testing.assert_array_equal(loaded.embed(text), imported.embed(text))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imported", "uncased_L-2"]


@pytest.mark.parametrize("place", ["", "bert_model.ckpt", "bert_model.ckpt.index"])
def test_a_checkpoint_in_a_bucket(place: str, vocabulary: list[str], tmp_path: Path, store, monkeypatch):
    folder = write_folder(tmp_path / "uncased_L-2", vocabulary)
    for name in ("bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001", "notes"):
        (folder / name).touch()
    for path in folder.iterdir():
        store.put(f"uncased_L-2/{path.name}", path.read_bytes())

    def refuse(prefix: epath.Path) -> None:
        names = {path.name for path in folder.iterdir()}
        assert {path.name for path in prefix.parent.iterdir()} == names - {"notes"}
        raise InputError(f"{prefix}: read")

    monkeypatch.setattr(tensorflow_checkpoints, "open_variables", refuse)
    with pytest.raises(InputError, match=r"gs://bucket/uncased_L-2/bert_model\.ckpt: read"):
        import_checkpoint(f"gs://bucket/uncased_L-2/{place}".rstrip("/"), str(tmp_path / "imported"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "bert_config.json").unlink(), r"bert_config\.json"),
        (lambda folder: (folder / "vocab.txt").unlink(), r"vocab\.txt"),
    ],
)
def test_files_beside_the_checkpoint(change, message: str, vocabulary: list[str], tmp_path: Path):
    folder = write_folder(tmp_path / "uncased", vocabulary)
    (folder / "bert_model.ckpt.index").touch()
    change(folder)
    with pytest.raises(InputError, match=message):
        import_checkpoint(str(folder), str(tmp_path / "imported"))


def test_without_tensorflow_the_command_names_the_extra(
    vocabulary: list[str], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    folder = write_folder(tmp_path / "uncased", vocabulary)
    (folder / "bert_model.ckpt.index").touch()
    status = cli.main(["import", "--source", str(folder), "--output", str(tmp_path / "imported")])
    error = capsys.readouterr().err
    assert (status, len(helpers.error_lines(error))) == (2, 1)
    assert install_hint("tf") in error
    assert not (tmp_path / "imported").exists()
