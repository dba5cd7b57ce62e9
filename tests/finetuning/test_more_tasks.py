"""Choices, named entities and SQuAD, each on files that a small model can learn from."""

import json
import random
from pathlib import Path

import pytest
from support import helpers

from bert_jax.config import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.finetuning.finetune import finetune
from bert_jax.sections import with_values

SETTINGS = {
    "num_epochs": 3, "global_batch_size": 16, "log_every_steps": 10, "optimizer.learning_rate": 1e-2,
    "task.max_seq_len": 48, "optimizer.bias_correction": True,
}  # fmt: skip


def config_of(name: str, encoder: Path, folder: Path, **overrides: object) -> FinetuneConfig:
    return helpers.finetune_config(name, {**SETTINGS, "init": encoder, "data.path": folder}, **overrides)


def write_entities(path: Path, count: int, seed: int) -> None:
    """Words of the sea and of the town are entities, of one word or of two."""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        for _ in range(rng.randint(3, 8)):
            topic = rng.choice(["sea", "town", ""])
            if not topic:
                lines.append(f"{rng.choice(helpers.SMALL_WORDS)} O")
                continue
            lines.append(f"{rng.choice(helpers.TOPICS[topic])} B-{topic.upper()}")
            lines.append("the O")
        lines.append("")
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("document_context", "encoder", "epochs"),
    [
        pytest.param(False, "checkpoint", 4, marks=pytest.mark.long),
        (True, "checkpoint", 4),
        pytest.param(False, "sentencepiece_checkpoint", 40, marks=pytest.mark.long),  # words of several pieces
    ],
)
def test_entities_are_learned(document_context, encoder, epochs, request: pytest.FixtureRequest, tmp_path: Path):
    checkpoint = request.getfixturevalue(encoder)
    write_entities(tmp_path / "train.conll", 96, 0)
    write_entities(tmp_path / "dev.conll", 30, 1)
    (tmp_path / "test.conll").write_text("-DOCSTART-\n\nthe\nship\n\nmoon\n")  # words without tags
    config = config_of("ner", checkpoint, tmp_path, task__document_context=document_context, num_epochs=epochs)
    scores = finetune(config, str(tmp_path / "run"))["dev"]
    assert scores["f1"] > 0.95
    assert scores["f1_SEA"] > 0.9
    tagged = (tmp_path / "run" / "predictions" / "test.conll").read_text().splitlines()
    assert [line.split()[0] for line in tagged if line] == ["the", "ship", "moon"]
    assert all(len(line.split()) == 2 for line in tagged if line)
    written = (tmp_path / "run" / "predictions" / "dev.conll").read_text().splitlines()
    gold = (tmp_path / "dev.conll").read_text().splitlines()
    assert [" ".join(line.split()[:2]) for line in written if line] == [line for line in gold if line]


def test_training_file_without_entities_is_refused(checkpoint: Path, tmp_path: Path):
    (tmp_path / "train.conll").write_text("the O\nship SEA\n\nthe O\n\n")
    with pytest.raises(InputError, match=r"train\.conll: "):
        finetune(config_of("ner", checkpoint, tmp_path), str(tmp_path / "other"))


def write_squad(path: Path, count: int, seed: int, *, version_2: bool) -> None:
    """The answer is the one word of the sea that a paragraph has, or none."""
    rng = random.Random(seed)
    paragraphs = []
    for number in range(count):
        words = [rng.choice(helpers.TOPICS["town"] + helpers.SMALL_WORDS[:4]) for _ in range(rng.randint(20, 60))]
        has_answer = not version_2 or rng.random() < 0.6
        answer = rng.choice(["ship", "storm", "gull"])
        place = rng.randrange(len(words))
        if has_answer:
            words[place] = answer
        answers = [{"text": answer, "answer_start": len(" ".join([*words[:place], ""]))}] if has_answer else []
        question = {"id": f"q{number}", "question": "the sea of a", "answers": answers}
        if version_2:
            question["is_impossible"] = not has_answer
        paragraphs.append({"context": " ".join(words), "qas": [question]})
    version = "v2.0" if version_2 else "1.1"
    path.write_text(json.dumps({"version": version, "data": [{"title": "made up", "paragraphs": paragraphs}]}))


@pytest.mark.parametrize(
    ("version", "encoder", "questions"),
    [
        pytest.param("1.1", "checkpoint", 120, marks=pytest.mark.long),
        ("2.0", "checkpoint", 120),
        # "gull" is 4 pieces, of which the last two are the same: more questions to tell them apart.
        pytest.param("1.1", "sentencepiece_checkpoint", 1000, marks=pytest.mark.long),
    ],
)
def test_answers_are_learned(version, encoder, questions, request: pytest.FixtureRequest, tmp_path: Path):
    checkpoint = request.getfixturevalue(encoder)
    write_squad(tmp_path / f"train-v{version}.json", questions, 0, version_2=version == "2.0")
    write_squad(tmp_path / f"dev-v{version}.json", 30, 1, version_2=version == "2.0")
    config = config_of(
        f"squad:{version}", checkpoint, tmp_path, task__doc_stride=16, task__max_query_length=8,
        num_epochs=5 if encoder == "checkpoint" else 8,
    )  # fmt: skip
    scores = finetune(config, str(tmp_path / "run"))["dev"]
    assert scores["best_f1" if version == "2.0" else "f1"] > 90
    answers = json.loads((tmp_path / "run" / "predictions" / "predictions.json").read_text())
    assert set(answers) == {f"q{number}" for number in range(30)}
    assert (tmp_path / "run" / "predictions" / "null_odds.json").exists() == (version == "2.0")


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_questions_to_score_need_an_answer_and_none_are_predicted_alone(version: str, checkpoint: Path, tmp_path: Path):
    for name in ("train", "dev"):
        write_squad(tmp_path / f"{name}-v{version}.json", 20, 0, version_2=False)
    dev = tmp_path / f"dev-v{version}.json"
    dev.write_text(dev.read_text().replace('"answers": [{', '"unknown": [{'))
    config = config_of(f"squad:{version}", checkpoint, tmp_path, task__doc_stride=16, task__max_query_length=8)
    with pytest.raises(InputError, match=rf"{dev.name}: 20 .*q0.*/squad:2\.0"):
        finetune(config, str(tmp_path / "run"))
    config = with_values(config, {"task.test": "test.json"})
    with pytest.raises(InputError, match=r"task\.test=test\.json.*bert-jax predict"):
        finetune(config, str(tmp_path / "run"))


@pytest.mark.parametrize("name", ["swag", "ner", "squad"])
def test_files_that_are_not_there_are_named(name, checkpoint: Path, tmp_path: Path):
    with pytest.raises(InputError, match=r"train[\w.-]*\.(csv|conll|json).* task\.train=FILE"):
        finetune(config_of(name, checkpoint, tmp_path, task__max_seq_len=64), str(tmp_path / "run"))
