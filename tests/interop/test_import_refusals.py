"""Tests the variants of folders that import reads, and the errors for those it refuses."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import sources

from bert_jax.errors import InputError
from bert_jax.interop.importing import import_checkpoint
from bert_jax.model.bert import HEADS

WORDS = "bert.embeddings.word_embeddings.weight"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"
DECODER = "cls.predictions.decoder.weight"


# --- Weights ---------------------------------------------------------------------------------------------------------


def rename(change):
    def apply(weights: dict[str, np.ndarray]) -> None:
        for name in list(weights):
            weights[change(name)] = weights.pop(name)

    return apply


@pytest.mark.parametrize(
    "change",
    [
        rename(lambda name: name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")),
        rename(lambda name: name.removeprefix("bert.")),
        rename(lambda name: name.replace("cls.predictions.bias", "cls.predictions.decoder.bias")),
        rename(lambda name: DECODER if name == WORDS else name),
        lambda weights: weights.update({"bert.embeddings.position_ids": np.arange(64)[None]}),
        lambda weights: weights.update(
            {DECODER: weights[WORDS].copy(), "cls.predictions.decoder.bias": weights["cls.predictions.bias"].copy()}
        ),
    ],
    ids=["gamma and beta", "no prefix", "bias of the decoder", "word embeddings of the decoder", "buffer", "tied"],
)
def test_other_names_of_the_same_weights(change, folder: Path, source: Path):
    sources.edit_weights(folder, change)
    sources.assert_reads_as(folder, source)


def test_the_padding_of_the_vocabulary_is_zero(folder: Path, vocabulary: list[str], tmp_path: Path):
    parameters = import_checkpoint(str(folder), str(tmp_path / "imported")).load_parameters()
    assert parameters["embeddings"]["word"].shape == (128, 48)
    assert not np.any(parameters["embeddings"]["word"][len(vocabulary) :])
    assert not np.any(parameters["mlm_head"]["output_bias"][len(vocabulary) :])
    assert np.all(np.any(parameters["embeddings"]["word"][: len(vocabulary)], axis=1))


def without(name: str):
    return lambda weights: weights.pop(name)


def with_weight(name: str, *shape: int, dtype=np.float32):
    return lambda weights: weights.update({name: np.ones(shape, dtype)})


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (without(QUERY), [f"{QUERY} [48, 48]"]),
        (without("cls.seq_relationship.bias"), ["cls.seq_relationship.bias [2]"]),
        (without("bert.pooler.dense.bias"), ["bert.pooler.dense.bias [48]"]),
        (with_weight("bert.encoder.layer.2.output.dense.bias", 48), ["bert.encoder.layer.2.output.", "48"]),
        (with_weight("classifier.weight", 3, 48), ["classifier.weight [3, 48]"]),
        (with_weight(QUERY, 48, 47), [f"{QUERY} [48, 47]", "[48, 48]"]),
        (with_weight(WORDS, 128, 48), [f"{WORDS} [128, 48]", "[103, 48]"]),
        (with_weight(DECODER, 103, 48), [f"{DECODER} [103, 48]", f"{WORDS} [103, 48]"]),
        (with_weight(DECODER, 104, 48), [f"{DECODER} [104, 48]", f"{WORDS} [103, 48]"]),
        (with_weight("cls.predictions.decoder.bias", 103), ["decoder.bias [103]", "cls.predictions.bias"]),
        (with_weight("pooler.dense.bias", 48), ["bert.pooler.dense.bias and pooler.dense.bias"]),
        (with_weight(QUERY, 48, 48, dtype=np.float64), [QUERY, "F64", "BF16"]),
        (with_weight(QUERY, 48, 48, dtype=np.int8), [QUERY, "I8"]),
    ],
)
def test_weights_that_do_not_fit(change, messages: list[str], folder: Path):
    sources.edit_weights(folder, change)
    sources.refused(folder, *messages)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(value: float, folder: Path):
    sources.edit_weights(folder, lambda weights: weights[QUERY].__setitem__((3, 4), value))
    sources.refused(folder, f"model.safetensors: {QUERY} ")


def test_more_layers_than_could_be_named(folder: Path):
    sources.edit_json(folder / "config.json", num_hidden_layers=10**12)
    sources.refused(folder, "num_hidden_layers=1000000000000")


def test_a_next_sentence_head_needs_a_pooler(folder: Path):
    sources.edit_json(folder / "config.json", architectures=None)
    sources.edit_weights(folder, lambda weights: [weights.pop(f"bert.pooler.dense.{x}") for x in ("weight", "bias")])
    sources.refused(folder, "bert.pooler.dense.weight [48, 48]")


# --- Config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({"model_type": kind, "architectures": ["OtherModel"]}, f"model_type='{kind}'")
            for kind in ("roberta", "new")
        ),
        ({"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering"),
        ({"architectures": ["BertForSomethingNew"]}, "BertForSomethingNew"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"hidden_act": "swish"}, "swish"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"hidden_size": "large"}, "hidden_size"),
        ({"is_decoder": "no"}, "is_decoder"),
        ({"layer_norm_eps": []}, "layer_norm_eps"),
        ({"layer_norm_eps": float("nan")}, "nan"),
        ({"layer_norm_eps": -1}, "-1"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"architectures": [1]}, "architectures=[1]"),
        ({"architectures": 5}, "architectures=5"),
        ({"architectures": "BertModel"}, "architectures='BertModel'"),
        ({"vocab_size": 104}, "vocab_size=104"),
    ],
)
def test_configs_that_cannot_be_honoured(fields: dict, message: str, folder: Path):
    sources.edit_json(folder / "config.json", **fields)
    sources.refused(folder, message, "config.json")


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000], ids=["open", "list", "deep"])
def test_a_config_that_is_none(text: str, folder: Path):
    (folder / "config.json").write_text(text)
    sources.refused(folder, "config.json")


# --- Folders ---------------------------------------------------------------------------------------------------------


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_code_of_a_pickle_runs(folder: Path, tmp_path: Path):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "unpickled")))
    sources.refused(folder, "pytorch_model.bin: ")
    assert not (folder / "unpickled").exists()
    sources.edit_json(folder / "config.json", architectures=5)
    sources.refused(folder, "config.json: architectures=5")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "config.json and model.safetensors"),
        (("config.json",), "config.json and model.safetensors"),
        (("model.safetensors",), "config.json"),
        (("bert_model.ckpt.meta", "bert_config.json"), "TensorFlow"),
        (("config.json", "a.pt", "b.bin"), "a.pt, b.bin"),
    ],
)
def test_other_folders(files: tuple[str, ...], message: str, tmp_path: Path):
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in files:
        (folder / name).write_text("{}")
    sources.refused(folder, message)


def test_a_name_on_a_hub_is_no_folder(tmp_path: Path):
    with pytest.raises(InputError, match=r"^google-bert/bert-base-uncased: "):
        import_checkpoint("google-bert/bert-base-uncased", str(tmp_path / "output"))


def test_a_damaged_file(folder: Path):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    sources.refused(folder, "model.safetensors: ")


def test_weights_that_are_no_file(folder: Path):
    path = folder / "model.safetensors"
    path.unlink()
    path.mkdir()
    sources.refused(folder, "model.safetensors: ")
    path.rmdir()
    path.symlink_to("../blobs/0123")
    sources.refused(folder, "model.safetensors: ")


def shard(folder: Path) -> dict[str, str]:
    """Cuts the model in two, and returns which weight is where."""
    weights, names = sources.weights_of(folder), ("model-1.safetensors", "model-2.safetensors")
    placed = {name: names[number % 2] for number, name in enumerate(weights)}
    for file in names:
        save_file({name: weights[name] for name in weights if placed[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    sources.edit_json(folder / "model.safetensors.index.json", weight_map=placed)
    return placed


def test_shards(folder: Path, source: Path):
    shard(folder)
    sources.assert_reads_as(folder, source)


def test_shards_that_are_not_of_their_index(folder: Path):
    index = folder / "model.safetensors.index.json"
    placed = shard(folder)
    sources.edit_json(index, weight_map={name: file for name, file in placed.items() if name != QUERY})
    sources.refused(folder, f"{QUERY!r}", "model.safetensors.index.json")
    sources.edit_json(index, weight_map={**placed, "more": "model-1.safetensors"})
    sources.refused(folder, "'more'", "model.safetensors.index.json")
    sources.edit_json(index, weight_map=["x"])
    sources.refused(folder, "weight_map")
    sources.edit_json(index, weight_map=placed)
    (folder / "model-2.safetensors").unlink()
    sources.refused(folder, "model-2.safetensors: ")


# --- Output ----------------------------------------------------------------------------------------------------------


def test_an_output_that_is_taken(folder: Path, tmp_path: Path):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "mine").write_text("mine")
    for output in (tmp_path / "output", tmp_path / "output" / "mine", folder):
        with pytest.raises(InputError, match=str(output)):
            import_checkpoint(str(folder), str(output))
    assert (tmp_path / "output" / "mine").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert import_checkpoint(str(folder), str(tmp_path / "empty")).heads == HEADS
    assert import_checkpoint(str(folder), str(tmp_path / "new" / "er")).heads == HEADS
