"""What import reads in several forms, and what it refuses: each in one message that names what is wrong."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import helpers
import numpy as np
import pytest
import sources
from safetensors.numpy import save_file

from bert_jax.data.tokenization import WordPieceTokenizer
from bert_jax.errors import InputError
from bert_jax.interop.importing import import_checkpoint
from bert_jax.model.bert import HEADS

WORDS = "bert.embeddings.word_embeddings.weight"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"
DECODER = "cls.predictions.decoder.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> Path:
    folder = sources.write_source(tmp_path_factory.mktemp("source") / "hf", vocabulary)
    sources.write_tokenizer(folder, vocabulary)
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(source, tmp_path / "hf"))


def assert_reads_as(folder: Path, source: Path) -> None:
    found = import_checkpoint(str(folder), str(folder.with_name("imported")))
    before = import_checkpoint(str(source), str(folder.with_name("before")))
    assert found.heads == before.heads
    sources.assert_same_parameters(found.load_parameters(), before.load_parameters())


def refused(folder: Path, *messages: str, **options) -> None:
    with pytest.raises(InputError) as refusal:
        import_checkpoint(str(folder), str(folder.with_name("output")), **options)
    for message in messages:
        assert message in str(refusal.value)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing, not even half of it


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
    assert_reads_as(folder, source)


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
        (without(QUERY), [f"missing: {QUERY} [48, 48]"]),
        (without("cls.seq_relationship.bias"), ["missing: cls.seq_relationship.bias [2]"]),
        (without("bert.pooler.dense.bias"), ["missing: bert.pooler.dense.bias [48]"]),
        (with_weight("bert.encoder.layer.2.output.dense.bias", 48), ["unexpected: bert.encoder.layer.2.output.", "48"]),
        (with_weight("classifier.weight", 3, 48), ["unexpected: classifier.weight [3, 48]"]),
        (with_weight(QUERY, 48, 47), [f"of another shape: {QUERY} [48, 47], not [48, 48]"]),
        (with_weight(WORDS, 128, 48), [f"of another shape: {WORDS} [128, 48], not [103, 48]"]),
        (with_weight(DECODER, 103, 48), [f"{DECODER} [103, 48] is not equal to {WORDS} [103, 48]"]),
        (with_weight(DECODER, 104, 48), [f"{DECODER} [104, 48] is not equal to {WORDS} [103, 48]"]),
        (with_weight("cls.predictions.decoder.bias", 103), ["decoder.bias [103] is not equal to cls.predictions.bias"]),
        (with_weight("pooler.dense.bias", 48), ["pooler.dense.bias", "are two names of one weight"]),
        (with_weight(QUERY, 48, 48, dtype=np.float64), [f"{QUERY} is of type F64", "BF16"]),
        (with_weight(QUERY, 48, 48, dtype=np.int8), [f"{QUERY} is of type I8"]),
    ],
)
def test_weights_that_do_not_fit(change, messages: list[str], folder: Path):
    sources.edit_weights(folder, change)
    refused(folder, *messages)


def test_no_more_weights_are_named_than_one_reads(folder: Path):
    sources.edit_json(folder / "config.json", num_hidden_layers=3)
    refused(folder, "missing: bert.encoder.layer.2.attention.self.query.weight [48, 48]", " and 12 more")


@pytest.mark.parametrize(
    ("architecture", "missing"),
    [
        ("BertForPreTraining", "cls.seq_relationship.weight"),
        ("BertForNextSentencePrediction", "cls.seq_relationship.weight"),
        (None, ""),
    ],
)
def test_the_architecture_says_which_heads_there_have_to_be(architecture: str | None, missing: str, folder: Path):
    sources.edit_json(folder / "config.json", architectures=architecture and [architecture])
    sources.edit_weights(folder, without("cls.seq_relationship.weight"))
    sources.edit_weights(folder, without("cls.seq_relationship.bias"))
    if missing:
        refused(folder, f"missing: {missing} [2, 48]")
    else:
        assert import_checkpoint(str(folder), str(folder.with_name("output"))).heads == ("pooler", "mlm_head")


def test_a_next_sentence_head_needs_a_pooler(folder: Path):
    sources.edit_json(folder / "config.json", architectures=None)
    sources.edit_weights(folder, lambda weights: [weights.pop(f"bert.pooler.dense.{x}") for x in ("weight", "bias")])
    refused(folder, "missing: bert.pooler.dense.weight [48, 48]")


# --- Config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"position_embedding_type": "relative_key_query"}, "position_embedding_type is 'relative_key_query'"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is {'0': [1]}"),
        ({"quantization_config": {"bits": 8}}, "quantization_config is"),
        ({"model_type": "roberta"}, "model_type is 'roberta'"),
        ({"architectures": ["BertForQuestionAnswering"]}, "architectures has BertForQuestionAnswering"),
        ({"hidden_act": "swish"}, "hidden_act is one of gelu, gelu_new, gelu_pytorch_tanh, relu, not 'swish'"),
        ({"num_attention_heads": 5}, "hidden_size 48 does not divide by num_attention_heads 5"),
        ({"hidden_size": "48"}, "hidden_size has to be a whole number, not '48'"),
        ({"is_decoder": "no"}, "is_decoder has to be true or false, not 'no'"),
        ({"layer_norm_eps": "1e-12"}, "layer_norm_eps has to be a finite number"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps has to be a finite number, not nan"),
        ({"layer_norm_eps": -1}, "layer_norm_eps has to be above 0, not -1"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers has to be a whole number"),
        ({"architectures": [1]}, "architectures is [1]: a list of names"),
        ({"architectures": 5}, "architectures is 5: a list of names"),
        ({"architectures": "BertModel"}, "architectures is 'BertModel': a list of names"),
        ({"vocab_size": 104}, "the tokenizer has 103 pieces and config.json vocab_size=104"),
    ],
)
def test_configs_that_cannot_be_honoured(fields: dict, message: str, folder: Path):
    sources.edit_json(folder / "config.json", **fields)
    refused(folder, message, "config.json")


@pytest.mark.parametrize("field", ["vocab_size", "layer_norm_eps", "is_decoder", "hidden_act"])
def test_null_is_no_value(field: str, folder: Path):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: None}))
    refused(folder, f"config.json: {field} has to be", "not None")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_none(text: str, folder: Path):
    (folder / "config.json").write_text(text)
    refused(folder, "config.json")


def test_absent_fields_are_what_transformers_takes_them_for(folder: Path):
    sources.edit_json(
        folder / "config.json", hidden_act=None, layer_norm_eps=None, type_vocab_size=None, model_type=None
    )
    config = import_checkpoint(str(folder), str(folder.with_name("output"))).bert_config
    assert (config.hidden_act, config.layer_norm_eps, config.type_vocab_size) == ("gelu", 1e-12, 2)


# --- Tokenizer -------------------------------------------------------------------------------------------------------


def edit_tokenizer(folder: Path, part: str, **values: object) -> None:
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    sources.edit_json(path, **{part: {**described[part], **values}})


def test_case_is_what_the_folder_says_or_what_is_given(folder: Path):
    (folder / "tokenizer.json").unlink()
    for number, (stated, given, lowercase) in enumerate(
        [(True, None, True), (False, None, False), (None, True, True), (None, False, False), (True, False, False)]
    ):
        sources.edit_json(folder / "tokenizer_config.json", do_lower_case=stated, tokenizer_class="BertTokenizer")
        checkpoint = import_checkpoint(str(folder), str(folder.with_name(str(number))), lowercase=given)
        assert checkpoint.tokenizer.lowercase is lowercase


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("only", ["tokenizer.json", "all"])
def test_both_files_that_say_the_case(lowercase: bool, only: str, folder: Path, vocabulary: list[str]):
    sources.write_tokenizer(folder, vocabulary, lowercase=lowercase)
    if only == "tokenizer.json":
        (folder / "tokenizer_config.json").unlink()
    assert import_checkpoint(str(folder), str(folder.with_name("output"))).tokenizer.lowercase is lowercase


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_tokenizer_of_our_own(lowercase: bool, folder: Path, vocabulary: list[str]):
    tokenizer = WordPieceTokenizer(vocabulary, lowercase)
    tokenizer.save_huggingface(str(folder), model_max_length=64)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (folder / name).unlink()
    assert import_checkpoint(str(folder), str(folder.with_name("output"))).tokenizer.sha256 == tokenizer.sha256


def test_a_case_that_nobody_knows(folder: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    refused(folder, "does not say whether", "give --cased or --uncased")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: sources.edit_json(f / "tokenizer_config.json", do_lower_case=False), "do_lower_case in"),
        (lambda f: sources.edit_json(f / "tokenizer_config.json", strip_accents=False), "strip_accents is False"),
        (lambda f: sources.edit_json(f / "tokenizer_config.json", tokenize_chinese_chars=False), "tokenize_chinese"),
        (lambda f: edit_tokenizer(f, "normalizer", clean_text=False), "clean_text is False"),
        (lambda f: edit_tokenizer(f, "normalizer", handle_chinese_chars=False), "handle_chinese_chars is False"),
        (lambda f: edit_tokenizer(f, "normalizer", type="NFC"), "normalizer is of type 'NFC'"),
        (lambda f: sources.edit_json(f / "tokenizer.json", pre_tokenizer=None), "pre_tokenizer is of type None"),
        (lambda f: edit_tokenizer(f, "model", type="BPE"), "model is of type 'BPE'"),
        (lambda f: edit_tokenizer(f, "model", unk_token="<unk>"), "unk_token is '<unk>'"),
        (lambda f: edit_tokenizer(f, "model", continuing_subword_prefix="@@"), "continuing_subword_prefix is '@@'"),
        (lambda f: edit_tokenizer(f, "model", vocab={"[PAD]": 0, "a": 2}), "without a gap"),
        (lambda f: sources.edit_json(f / "tokenizer.json", added_tokens=[{"id": 103, "content": "<x>"}]), "'<x>'"),
        (lambda f: edit_tokenizer(f, "model", vocab={"[PAD]": 0}), "added token '[UNK]'"),
        (lambda f: (f / "vocab.txt").write_text((f / "vocab.txt").read_text() + "more\n"), "different vocabularies"),
        (lambda f: [(f / name).unlink() for name in ("vocab.txt", "tokenizer.json")], "no vocab.txt and no"),
        (lambda f: (f / "vocab.txt").write_text("[PAD]\n"), "vocab.txt: the vocabulary has no [UNK]"),
    ],
)
def test_tokenizers_that_are_not_berts(spoil, message: str, folder: Path):
    spoil(folder)
    refused(folder, message)


def test_a_tokenizer_of_its_own_class(folder: Path):
    (folder / "tokenizer.json").unlink()
    sources.edit_json(folder / "tokenizer_config.json", tokenizer_class="BertJapaneseTokenizer")
    refused(folder, "tokenizer_class 'BertJapaneseTokenizer'")


# --- Folders ---------------------------------------------------------------------------------------------------------


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(folder: Path, tmp_path: Path):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "unpickled")))
    refused(folder, "only pytorch_model.bin", "pickles", "from transformers import BertForPreTraining", str(folder))
    assert not (folder / "unpickled").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "config.json and model.safetensors (or model.safetensors.index.json) are wanted"),
        (("config.json",), "holds no model"),
        (("model.safetensors",), "has no config.json"),
        (("bert_model.ckpt.index", "bert_model.ckpt.meta", "bert_config.json"), "a TensorFlow checkpoint"),
        (
            ("config.json", "model.pt"),
            "only model.pt, and pickles can run any code: not read. If you trust it, load it",
        ),
    ],
)
def test_other_folders(files: tuple[str, ...], message: str, tmp_path: Path):
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in files:
        (folder / name).write_text("{}")
    refused(folder, message)


def test_a_name_on_a_hub_is_no_folder(tmp_path: Path):
    with pytest.raises(InputError, match="not a folder on this machine: download"):
        import_checkpoint("google-bert/bert-base-uncased", str(tmp_path / "output"))


def test_a_damaged_file(folder: Path):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    refused(folder, "model.safetensors is damaged")


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
    assert_reads_as(folder, source)


def test_shards_that_are_not_of_their_index(folder: Path):
    index = folder / "model.safetensors.index.json"
    placed = shard(folder)
    sources.edit_json(index, weight_map={name: file for name, file in placed.items() if name != QUERY})
    refused(folder, f"{QUERY} is not in the index")
    sources.edit_json(index, weight_map={**placed, "more": "model-1.safetensors"})
    refused(folder, "more is in the index alone")
    sources.edit_json(index, weight_map={**placed, "more": "../model-1.safetensors"})
    refused(folder, "there is no '../model-1.safetensors' beside it")
    sources.edit_json(index, weight_map=["x"])
    refused(folder, "no weight_map")
    sources.edit_json(index, weight_map=placed)
    (folder / "model-2.safetensors").unlink()
    refused(folder, "there is no 'model-2.safetensors' beside it")


# --- Output ----------------------------------------------------------------------------------------------------------


def test_an_output_that_is_taken(folder: Path, tmp_path: Path):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "mine").write_text("mine")
    for output in (tmp_path / "output", tmp_path / "output" / "mine", folder):
        with pytest.raises(InputError, match="is taken"):
            import_checkpoint(str(folder), str(output))
    assert (tmp_path / "output" / "mine").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert import_checkpoint(str(folder), str(tmp_path / "empty")).heads == HEADS
    assert import_checkpoint(str(folder), str(tmp_path / "new" / "er")).heads == HEADS


def test_killed_before_it_is_whole_it_is_not_there(folder: Path, tmp_path: Path):
    """The kill comes at the very last moment, when all that is missing is the folder's name."""
    output = tmp_path / "output"
    code = f"""
import os
rename = os.rename
os.rename = lambda a, b, **options: os._exit(9) if str(b) == {str(output)!r} else rename(a, b, **options)
from bert_jax.interop.importing import import_checkpoint
import_checkpoint({str(folder)!r}, {str(output)!r})
"""
    killed = subprocess.run([sys.executable, "-c", code], env=helpers.child_environment(), check=False)
    assert killed.returncode == 9
    assert not output.exists()
    assert import_checkpoint(str(folder), str(output)).heads == HEADS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "output"]
