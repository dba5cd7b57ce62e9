"""Pseudo-log-likelihoods of texts, beside those of torch and what the command writes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from support import sources, torch_models
from support.compilations import logged_compilations

import bert_jax
from bert_jax.errors import InputError

TEXTS = [
    "the ship sees a storm .",
    "the zebra hears [MASK] .",
    "",
    "a fox near the harbour",
    "xylophones ||| the moon .",
]


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> tuple[Path, object]:
    folder = tmp_path_factory.mktemp("torch") / "hf"
    return folder, torch_models.save_torch(folder, vocabulary, "BertForMaskedLM")


@pytest.fixture(scope="module")
def bert(torch_model) -> bert_jax.PreTrained:
    return bert_jax.load(str(torch_model[0]))


def torch_score(model, pieces: list[str], ids: list[int], mask: int, masking: str) -> float:
    """The score of one text, one forward pass a token."""
    torch, _ = torch_models.require_torch()
    total = 0.0
    for place in range(1, len(ids) - 1):
        masked = list(ids)
        masked[place] = mask
        later = place + 1
        while masking == "within_word_l2r" and pieces[later].startswith("##"):
            masked[later] = mask
            later += 1
        with torch.no_grad():
            logits = model(torch.tensor([masked])).logits[0, place].double()
        total += float(torch.log_softmax(logits, -1)[ids[place]])
    return total


@pytest.mark.parametrize("masking", ["token", "within_word_l2r"])
def test_scores_are_those_of_torch(masking: str, torch_model, bert: bert_jax.PreTrained):
    _, model = torch_model
    scores = bert.score(TEXTS, masking=masking, batch_size=8)
    assert [score.text for score in scores] == TEXTS
    for text, score in zip(TEXTS, scores, strict=True):
        inside = bert.tokenizer.encode_batch([text])[0]
        ids = [bert.tokenizer.cls_id, *inside, bert.tokenizer.sep_id]
        pieces = [bert.tokenizer.id_to_token(token) for token in ids]
        assert (score.tokens, score.truncated) == (len(inside), False)
        expected = torch_score(model, pieces, ids, bert.tokenizer.mask_id, masking)
        assert score.score == pytest.approx(expected, rel=1e-4), text
    if masking == "within_word_l2r":
        plain = bert.score(TEXTS, batch_size=8)  # equal for texts whose words are pieces
        differ = [text for text, a, b in zip(TEXTS, scores, plain, strict=True) if abs(a.score - b.score) > 1e-3]
        assert differ == [text for text in TEXTS if "zebra" in text or "xylophones" in text]


def test_scores_do_not_depend_on_the_batch(bert: bert_jax.PreTrained):
    expected = [score.score for score in bert.score(TEXTS)]
    for size in (1, 3):
        np.testing.assert_allclose([score.score for score in bert.score(TEXTS, batch_size=size)], expected, rtol=1e-5)
    assert bert.score(TEXTS[0])[0].score == pytest.approx(expected[0], rel=1e-5)


def test_the_command_writes_the_scores_of_a_file(torch_model, bert: bert_jax.PreTrained, tmp_path: Path):
    texts = [*TEXTS, "ship " * 62, "ship " * 63]  # the model reads 64 tokens, [CLS] and [SEP] included
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n")
    output = tmp_path / "scores.jsonl"
    result = bert_jax.score(torch_model[0], tmp_path / "lines.txt", output, batch_size=8)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    expected = bert.score([text.strip() for text in texts])
    for row, score in zip(rows, expected, strict=True):
        assert row == {**vars(score), "score": pytest.approx(score.score, rel=1e-5)}
    assert [(row["tokens"], row["truncated"]) for row in rows[-2:]] == [(62, False), (62, True)]
    tokens = sum(row["tokens"] for row in rows)
    assert dict(result) == {
        "output": str(output), "lines": 7, "tokens": tokens, "truncated_lines": 1,
        "pseudo_perplexity": pytest.approx(math.exp(-sum(row["score"] for row in rows) / tokens)),
    }  # fmt: skip


def test_texts_of_many_lengths_share_one_program(bert: bert_jax.PreTrained):
    with logged_compilations() as found:
        scores = bert.score([" ".join(["ship"] * length) for length in range(1, 15)], batch_size=16)
        bert.score(["the ship sees the storm ."] * 3, batch_size=16)
    assert sum(score.tokens for score in scores) == 105
    assert [name for name, _ in found].count("target_log_probabilities") == 1


def test_what_cannot_be_scored_is_refused(vocabulary: list[str], bert: bert_jax.PreTrained, tmp_path: Path):
    sources.write_checkpoint(tmp_path / "ltr", vocabulary, heads=("mlm_head",), is_decoder=True, num_hidden_layers=1)
    sources.write_checkpoint(tmp_path / "headless", vocabulary, heads=(), num_hidden_layers=1)
    sources.write_checkpoint(tmp_path / "words", vocabulary, heads=("mlm_head",), num_hidden_layers=1)
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "lines.txt").write_text("the ship .\n")
    for arguments, message in (
        (("ltr", "lines.txt", "new"), "left-to-right"),
        (("headless", "lines.txt", "new"), "mlm_head"),
        (("words", "lines.txt", "lines.txt"), r"output=.*lines\.txt: already exists"),
    ):
        with pytest.raises(InputError, match=message):
            bert_jax.score(*(tmp_path / name for name in arguments))
    for text, keys, message in (
        ([], {}, r"\b0 texts"), ("a", {"masking": "word"}, "masking=word: .*token.*within_word_l2r"),
        ("a", {"batch_size": 0}, "batch_size=0"), (["a", None], {}, "text=None"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            bert.score(text, **keys)
    with pytest.raises(InputError, match="left-to-right"):
        bert_jax.load(str(tmp_path / "ltr")).score("a")
