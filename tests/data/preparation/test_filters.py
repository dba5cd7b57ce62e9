"""Filters: what each option drops is counted, and nothing else is dropped."""

from dataclasses import replace

import numpy as np
import pytest
from support import helpers

from bert_jax.data.dataset import Counts, PreparedDataset
from bert_jax.data.options import PrepareOptions
from bert_jax.data.preparation.pipeline import prepare
from bert_jax.errors import InputError


def documents(count, seed=0):
    return helpers.make_corpus(documents=count, seed=seed).strip().split("\n\n")


def run(texts, tokenizer, folder, workers=1, **options):
    folder.mkdir(exist_ok=True)
    inputs = []
    for number in range(3):
        path = folder / f"{number}.txt"
        path.write_text("\n\n".join(texts[number::3]) + "\n")
        inputs.append(str(path))
    chosen = {"seq_len": 64, "sentences": "lines", "eval_fraction": 0.1, "bucket_tokens": 2048, **options}
    prepare(inputs, tokenizer, str(folder / "data"), PrepareOptions(**chosen), workers=workers)
    return PreparedDataset(str(folder / "data"))


def totals(dataset):
    """Returns documents, sentences and tokens of both splits, and the ids of all instances."""
    splits = dataset.info.splits.values()
    ids = [
        dataset.instances(name, np.arange(dataset.size(name)))["instance_ids"].tolist() for name in dataset.info.splits
    ]
    counts = tuple(sum(getattr(split, name) for split in splits) for name in ("documents", "sentences", "tokens"))
    return counts, ids


def test_duplicate_documents(tokenizer, tmp_path):
    once = documents(200)
    plain = run(once, tokenizer, tmp_path / "once")
    kept = run([*once, *once[:50], *once[:20]], tokenizer, tmp_path / "kept")
    assert totals(kept)[0][0] == 270
    assert set(kept.info.dropped.values()) == {Counts()}
    dropped = run([*once, *once[:50], *once[:20]], tokenizer, tmp_path / "dropped", drop_duplicates=True)
    counts = totals(kept)[0]
    lost = Counts(*(before - after for before, after in zip(counts, totals(plain)[0], strict=True)))
    assert {rule: count for rule, count in dropped.info.dropped.items() if count != Counts()} == {
        "duplicate_documents": lost
    }
    assert lost.documents == 70
    assert dropped.info.corpus == kept.info.corpus == Counts(*counts)
    assert totals(dropped)[0] == totals(plain)[0]
    assert dropped.token_counts().sum() == plain.token_counts().sum()


@pytest.mark.parametrize("workers", [1, 2])
def test_repeated_lines(workers, tokenizer, tmp_path):
    """Drops all occurrences of a line above the limit, and keeps a line at the limit."""
    plain = documents(120)
    noisy = [f"the menu near the owl and the moon .\n{text}" for text in plain]
    noisy[:5] = [f"{text}\nthe baker is in the harbour and the storm ." for text in noisy[:5]]
    clean = run(noisy, tokenizer, tmp_path / "clean", workers, max_line_repeats=5)
    expected = [*(f"{text}\nthe baker is in the harbour and the storm ." for text in plain[:5]), *plain[5:]]
    assert clean.info.dropped["repeated_lines"].sentences == 120
    assert totals(clean)[0] == totals(run(expected, tokenizer, tmp_path / "expected"))[0]
    stricter = run(noisy, tokenizer, tmp_path / "stricter", max_line_repeats=4)
    assert stricter.info.dropped["repeated_lines"].sentences == 125


# --- Filters together -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_lines_are_counted_in_distinct_documents(workers, tokenizer, tmp_path):
    """A repeated article stays once, since its lines repeat only because it does."""
    plain = documents(40)
    article = "the ship hears a storm . alpha\nthe baker finds the menu . beta"
    noisy = [*plain, *[f"the menu near the owl .\n{text}" for text in plain[:9]], *[article] * 13]
    both = run(noisy, tokenizer, tmp_path / "both", workers, drop_duplicates=True, max_line_repeats=8)
    assert both.info.dropped["duplicate_documents"].documents == 12
    assert both.info.dropped["repeated_lines"].sentences == 9
    assert totals(both)[0][0] == 40 + 9 + 1
    lines_alone = run(noisy, tokenizer, tmp_path / "lines", workers, max_line_repeats=8)
    assert lines_alone.info.dropped["repeated_lines"].documents == 13


@pytest.mark.parametrize(("articles", "held_out"), [(12, 2), (4, 2), (3, 0)])
def test_the_eval_split_has_two_documents_of_those_that_the_filters_keep(articles, held_out, tokenizer, tmp_path):
    """The lowest hashes are those of dropped documents in most corpora."""
    kept = documents(300)[:articles]
    texts = [*kept, *["the owl sees a menu .\n" * (n + 2) for n in range(100)]]
    data = run(texts, tokenizer, tmp_path, eval_fraction=1e-9, max_line_repeats=4)
    assert data.info.dropped["repeated_lines"].documents == 100
    assert data.info.splits["eval"].documents == held_out
    assert data.info.splits["train"].documents == articles - held_out


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("limits", "dropped"),
    [
        ({"drop_duplicates": True}, {"duplicate_documents": 1}),
        ({"drop_duplicates": True, "max_line_repeats": 1}, {"duplicate_documents": 1}),
        ({}, {}),
    ],
)
def test_filters_decide_on_documents_whose_lines_are_held_out(limits, dropped, workers, tokenizer, tmp_path):
    """Counts each document once, whole, though its lines are in both splits."""
    long = "\n".join(documents(100)).split("\n")
    texts = ["\n".join(f"{line} {number}" for number, line in enumerate(long)), "the ship"]
    texts += texts[:1]
    info = run(texts, tokenizer, tmp_path, workers, pairs="none", **{"eval_fraction": 0.02} | limits).info
    lost = {rule: counts.documents for rule, counts in info.dropped.items() if counts.documents}
    assert lost == dropped
    kept = [Counts(0, split.sentences, split.tokens) for split in info.splits.values()]
    assert replace(sum(info.dropped.values(), sum(kept, Counts())), documents=0) == replace(info.corpus, documents=0)
    assert 0 < info.splits["eval"].tokens < 0.1 * info.corpus.tokens


def test_filters_that_drop_everything_are_named(tokenizer, tmp_path):
    with pytest.raises(InputError, match=r"^(?!.*eval_fraction).* max_line_repeats="):
        run(documents(5) * 2, tokenizer, tmp_path, max_line_repeats=1)
    assert not (tmp_path / "data").exists()
