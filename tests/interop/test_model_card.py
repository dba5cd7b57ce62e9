"""The model card of an export, read by huggingface_hub's own code."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from support import helpers, sources

from bert_jax.interop import huggingface
from bert_jax.interop.architectures import ARCHITECTURES
from bert_jax.interop.huggingface import model_card
from bert_jax.text.vocabulary_options import VocabularyOptions
from bert_jax.text.vocabulary_training import train_vocabulary
from bert_jax.text.wordpiece import wordpiece_tokenizer
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.pretrain import pretrain

hub = pytest.importorskip("huggingface_hub", reason="needs the parity extra: torch and transformers")


def front_matter(folder: Path) -> dict:
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


@pytest.fixture(scope="module")
def workdir(dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card") / "base"
    pretrain(helpers.small_config(dataset_dir, total_steps=2, optimizer__warmup_steps=1), str(folder))
    return folder


def test_a_pre_trained_model_with_its_evaluation(workdir: Path, tmp_path: Path):
    huggingface.export(open_checkpoint(str(workdir)), str(tmp_path / "my-bert"))
    assert hub.metadata_load(tmp_path / "my-bert" / "README.md") == front_matter(tmp_path / "my-bert")
    card = hub.ModelCard.load(tmp_path / "my-bert" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "fill-mask")
    assert (card.data.license, card.data.language, card.data.datasets) == (None, None, None)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row.get("split") == "eval" and row["step"] == 2]
    shown = {line.split(" | ")[1] for line in card.text.splitlines() if line.startswith("| eval |")}
    assert shown == {name for name, value in row.items() if isinstance(value, float)} - {"time"}
    assert f"| eval | mlm_loss | {row['mlm_loss']:.4f} |" in card.text
    assert "| `global_batch_size` |" in card.text
    assert f"{sum(value.size for value in sources.weights_of(tmp_path / 'my-bert').values()):,}" in card.text
    assert str(workdir.parent) not in card.content  # no path of this machine


def test_the_kind_of_tokenizer_and_its_rules(vocabulary: list[str], tmp_path: Path):
    checkpoint = sources.write_checkpoint(tmp_path / "checkpoint", vocabulary)
    sentences = helpers.make_corpus(20).split("\n")
    tokenizers = {
        "wordpiece, uncased, accents stripped": checkpoint.tokenizer,
        "wordpiece, uncased, accents kept": wordpiece_tokenizer(vocabulary, True, strip_accents=False),
        "wordpiece, cased, accents kept": wordpiece_tokenizer(vocabulary, False),
        "bpe, cased, accents kept": train_vocabulary(sentences, VocabularyOptions(kind="bpe", size=200, cased=True)),
    }
    for described, tokenizer in tokenizers.items():
        changed = dataclasses.replace(checkpoint, tokenizer=tokenizer)
        card = model_card(changed, "BertForPreTraining", "name", parameters=1)
        assert f"- {tokenizer.vocab_size:,} pieces, {described}\n" in card


def test_an_imported_model_has_no_results(vocabulary: list[str], tmp_path: Path):
    huggingface.export(sources.write_checkpoint(tmp_path / "checkpoint", vocabulary), str(tmp_path / "hf"))
    assert front_matter(tmp_path / "hf").keys() == {"library_name", "pipeline_tag", "tags"}
    sources.write_source(tmp_path / "nsp", vocabulary, ("pooler", "nsp_head"))
    assert "pipeline_tag" not in front_matter(tmp_path / "nsp")


@pytest.mark.parametrize("step", [7, 8])
@pytest.mark.parametrize(
    ("record", "architecture"),
    [
        ({"kind": "classify", "name": "glue/sst2", "classes": ["0", "1"]}, "BertForSequenceClassification"),
        ({"kind": "tag", "name": "ner", "tags": ["O", "B-X"]}, "BertForTokenClassification"),
        ({"kind": "span", "name": "squad/2.0"}, "BertForQuestionAnswering"),
    ],
)
def test_a_fine_tuned_model_with_its_scores(record: dict, architecture: str, step: int, workdir: Path, tmp_path: Path):
    """The scores are those in `result.json`, if they are of the checkpoint's step; no public data set is claimed."""
    steps = tmp_path / "run" / "checkpoints" / "7"
    steps.mkdir(parents=True)
    scores = {"dev": {"f1": 0.75, "accuracy": 0.5, "best_f1_thresh": -1.5, "total": 12, "NoAns_total": 3}}
    (tmp_path / "run" / "result.json").write_text(json.dumps({"step": 7, "scores": scores}))
    found = open_checkpoint(str(workdir))
    task = {"size": 2, "max_seq_len": 32, **record}
    checkpoint = dataclasses.replace(found, path=type(found.path)(steps), step=step, task=task)
    text = model_card(checkpoint, architecture, "mine", parameters=1234)
    assert "1,234" in text
    assert not any(name in text for name in ("nyu-mll", "rajpurkar", "SQuAD", "GLUE"))
    assert hub.ModelCard(text).data.pipeline_tag == ARCHITECTURES[architecture].pipeline
    results = [line for line in text.splitlines() if line.startswith("| dev |")]
    assert results == (["| dev | f1 | 0.7500 |", "| dev | accuracy | 0.5000 |"] if step == 7 else [])
