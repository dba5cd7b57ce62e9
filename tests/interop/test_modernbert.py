"""ModernBERT folders of `transformers`: every head in and out, what is refused, and training from one."""

from pathlib import Path

import numpy as np
import pytest
from support import continued, helpers, modernbert, sources
from support.devices import one_device  # noqa: F401
from support.torch_models import require_torch

import bert_jax
from bert_jax.config import load_config
from bert_jax.errors import InputError
from bert_jax.finetuning.finetune import finetune
from bert_jax.interop import huggingface
from bert_jax.interop.importing import import_checkpoint, open_source
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.sections import to_dict
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.pretrain import pretrain

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
PAIRS = ["it purrs .", "it barks loudly .", "no ."]
BIASES = {f"{part}_bias": True for part in ("attention", "mlp", "norm", "classifier")}
MODELS = [
    ("ModernBertForMaskedLM", {}),
    ("ModernBertForMaskedLM", {**BIASES, "decoder_bias": False, "global_attn_every_n_layers": 2}),
    ("ModernBertForMaskedLM", {"hidden_activation": "relu", "classifier_activation": "relu"}),
    ("ModernBertModel", {}),
    ("ModernBertForSequenceClassification", {}),
    ("ModernBertForSequenceClassification", {"classifier_pooling": "mean"}),
    ("ModernBertForSequenceClassification", {"num_labels": 1}),
    ("ModernBertForTokenClassification", {}),
    ("ModernBertForQuestionAnswering", {}),
    ("ModernBertForMultipleChoice", {"classifier_pooling": "mean"}),
]


def first_outputs(model, batch) -> np.ndarray:
    torch, _ = require_torch()
    with torch.no_grad():
        output = modernbert.torch_outputs(model.eval(), batch)
    logits = torch.stack([output.start_logits, output.end_logits], -1) if "start_logits" in output else output[0]
    return logits.numpy().T if type(model).__name__ == "ModernBertForMultipleChoice" else logits.numpy()


@pytest.mark.parametrize(("architecture", "fields"), MODELS)
def test_model_is_imported_and_exported(architecture: str, fields: dict, tmp_path: Path):
    _, transformers = require_torch()
    model = modernbert.save_torch(tmp_path / "hf", architecture, **fields)
    for source, number in (("hf", 1), ("out1", 2)):
        imported = import_checkpoint(str(tmp_path / source), str(tmp_path / f"in{number}"))
        assert huggingface.export(imported, str(tmp_path / f"out{number}")) == architecture
    for name in FILES:
        assert (tmp_path / "out1" / name).read_bytes() == (tmp_path / "out2" / name).read_bytes(), name
    before, after = (sources.weights_of(tmp_path / name) for name in ("hf", "out1"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    exported, info = getattr(transformers, architecture).from_pretrained(tmp_path / "out1", output_loading_info=True)
    assert not any(info.values())
    names = ["layer_types", "rope_parameters", "classifier_pooling", "pad_token_id", "cls_token_id", "num_labels"]
    for name in names + ["id2label"] * (model.config.num_labels == 3):
        assert getattr(exported.config, name) == getattr(model.config, name), name

    loaded = bert_jax.load(str(tmp_path / "hf"))
    batch = loaded.batch(modernbert.TEXTS, PAIRS)
    ours = loaded.model.encode(batch) if architecture == "ModernBertModel" else loaded.model(batch)
    ours = np.asarray(ours[0] if isinstance(ours, tuple) else ours)
    ours = ours[..., : loaded.config.vocab_size] if architecture == "ModernBertForMaskedLM" else ours
    real = np.asarray(batch["sequence_ids"]) > 0 if ours.ndim == 3 else ...
    for theirs in (model, exported):
        np.testing.assert_allclose(ours[real], first_outputs(theirs, batch)[real], atol=1e-5)


@pytest.mark.parametrize("decoder_bias", [True, False])
def test_the_encoder_of_a_fine_tuned_modernbert(decoder_bias: bool, tmp_path: Path):
    """Its layers before the output have the names of the masked-LM head's."""
    modernbert.save_torch(tmp_path / "hf", "ModernBertForSequenceClassification", decoder_bias=decoder_bias)
    checkpoint = import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "in"), drop=("classifier",))
    assert (checkpoint.task, checkpoint.heads) == (None, ())


def test_pipelines_of_transformers_agree_with_a_loaded_export(tmp_path: Path):
    _, transformers = require_torch()
    modernbert.save_torch(tmp_path / "hf")
    huggingface.export(open_source(str(tmp_path / "hf")), str(tmp_path / "out"))
    model, fill = bert_jax.load(str(tmp_path / "out")), transformers.pipeline("fill-mask", str(tmp_path / "out"))
    expected = [found["score"] for found in fill("the [MASK] sat on the mat .", top_k=5)]
    ours = [filling.probability for filling in model.fill_mask("the [MASK] sat on the mat .", top=5)[0]]
    assert ours == pytest.approx(expected, rel=1e-4)
    assert fill.tokenizer.model_input_names == ["input_ids", "attention_mask"]
    extract = transformers.pipeline("feature-extraction", str(tmp_path / "out"))
    hidden = np.array(extract(modernbert.TEXTS[1]))[0]
    np.testing.assert_allclose(model.encode(modernbert.TEXTS[1]).hidden_states[0], hidden, atol=1e-5)
    np.testing.assert_allclose(model.embed(modernbert.TEXTS[1])[0], hidden.mean(axis=0), atol=1e-5)


def test_older_names_in_a_config_are_read(tmp_path: Path):
    older = {"global_attn_every_n_layers": 2, "global_rope_theta": 50_000.0, "local_rope_theta": 5_000.0}
    modernbert.save_torch(tmp_path / "hf", **older)
    expected = open_source(str(tmp_path / "hf")).bert_config
    assert {name: getattr(expected, name) for name in older} == older
    sources.edit_json(tmp_path / "hf/config.json", **older, rope_parameters=None, layer_types=None,
                      position_embedding_type="absolute", layer_norm_eps=0.5)  # fmt: skip
    assert open_source(str(tmp_path / "hf")).bert_config == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"][::-1]},
         "layer_types="),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters.full_attention.rope_type="),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type='linear'"),
        ({"classifier_activation": "silu"}, "classifier_activation='silu'"),
        ({"architectures": ["BertForMaskedLM"]}, "architectures="),
        ({"layers": (0, 1)}, "layers=0,1"),
        ({"mlp_bias": True}, "missing: model.layers.0.mlp.Wi.bias [160]"),
        ({"norm_bias": None, "num_hidden_layers": 3, "layer_types": None}, "unexpected: model.layers.3.attn.Wo.weight"),
    ],
)  # fmt: skip
def test_other_models_are_refused(values: dict, expected: str, tmp_path: Path):
    modernbert.save_torch(tmp_path / "hf")
    layers = values.pop("layers", None)
    sources.edit_json(tmp_path / "hf/config.json", **values)
    sources.refused(tmp_path / "hf", expected, layers=layers)


@pytest.mark.parametrize("switch", [{"pre_norm": True}, {"type_vocab_size": 0}, {"norm_bias": False}])
def test_a_model_between_bert_and_modernbert_is_not_exported(switch: dict, vocabulary: list[str], tmp_path: Path):
    checkpoint = sources.write_checkpoint(tmp_path / "checkpoint", vocabulary, **switch)
    name, value = next(iter(switch.items()))
    with pytest.raises(InputError, match=f"{name}={value}"):
        huggingface.export(checkpoint, str(tmp_path / "hf"))


def test_a_model_of_the_config_is_exported_and_loads_in_transformers(vocabulary: list[str], tmp_path: Path):
    _, transformers = require_torch()
    switches = to_dict(load_config("modernbert_base").model) | {"hidden_size": 32, "intermediate_size": 48}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": len(vocabulary)}
    checkpoint = sources.write_checkpoint(tmp_path / "checkpoint", vocabulary, heads=("mlm_head",), **switches | sizes)
    huggingface.export(checkpoint, str(tmp_path / "hf"))
    loaded, info = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values())
    assert type(loaded).__name__ == "ModernBertForMaskedLM"
    assert open_source(str(tmp_path / "hf")).bert_config.attention_output_dropout == 0.1


def test_training_continues_from_an_imported_model(tmp_path: Path):
    modernbert.save_torch(tmp_path / "hf")
    import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "imported"))
    (tmp_path / "corpus.txt").write_text(helpers.make_corpus(documents=60))
    helpers.prepare_dataset(tmp_path / "corpus.txt", tmp_path / "hf/tokenizer.json", tmp_path / "data")
    trained = pretrain(continued.config(tmp_path / "data", tmp_path / "imported"), str(tmp_path / "run"))
    assert trained["mlm_loss"] > 0
    assert open_checkpoint(str(tmp_path / "run")).heads == ("mlm_head",)
    assert huggingface.export(open_checkpoint(str(tmp_path / "run")), str(tmp_path / "out")) == "ModernBertForMaskedLM"


@pytest.mark.parametrize("kind", ["text", "ner"])
def test_an_imported_model_is_fine_tuned(kind: str, tmp_path: Path):
    modernbert.save_torch(tmp_path / "hf")
    imported = import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "imported"))
    (tmp_path / "train.csv").write_text("text,label\n" + "the cat sat,animal\nit rains,weather\n" * 16)
    (tmp_path / "eng.train").write_text("the NN I-NP O\ncat NN I-NP I-LOC\n\nit NN I-NP O\nrains NN I-NP O\n\n" * 16)
    file = str(tmp_path / ("train.csv" if kind == "text" else "eng.train"))

    def tune(init: Path, run: str, **overrides: float) -> dict:
        settings = {
            "task.train": file, "task.dev": file, "task.max_seq_len": 16, "num_epochs": 4, "global_batch_size": 8,
            "model.hidden_dropout_prob": 0.0, "model.attention_probs_dropout_prob": 0.0, "compilation_cache": "none",
        }  # fmt: skip
        return finetune(helpers.finetune_config(kind, {"init": init, **settings}, **overrides), str(tmp_path / run))

    scores = tune(imported.path, "run", optimizer__learning_rate=1e-3)
    assert scores["dev"]["accuracy" if kind == "text" else "f1"] == 1.0
    trained = open_checkpoint(str(tmp_path / "run"))
    huggingface.export(trained, str(tmp_path / "out"))
    ours, exported = (bert_jax.load(str(tmp_path / name)) for name in ("run", "out"))
    assert ours.predict("the cat sat") == exported.predict("the cat sat")
    tune(trained.path, "again", optimizer__learning_rate=0.0)
    head = {"build": BertForTask, "head": TaskHead.from_dict(trained.task)}
    before, after = (
        open_checkpoint(str(path)).load_parameters(parts=["transform"], **head)
        for path in (trained.path, tmp_path / "again")
    )
    sources.assert_same_parameters(before, after)
