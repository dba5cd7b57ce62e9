import gzip
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support import helpers, preparing
from support.preparing import files, run

from bert_jax.data.corpora import corpus
from bert_jax.data.dataset import Counts
from bert_jax.data.preparation import shards
from bert_jax.data.preparation.pipeline import PrepareOptions
from bert_jax.errors import InputError


def write(path, documents):
    path.write_text("\n\n".join("\n".join(lines) for lines in documents) + "\n")
    return path


def numbered(documents, first=0, sentences=4):
    """Returns documents with distinct tokens: a sentence is seven letters, five for the document and two of its own."""
    letters = str.maketrans("0123456789", "abcdefghij")
    return [
        [" ".join(f"{number:05d}{sentence:02d}".translate(letters)) for sentence in range(sentences)]
        for number in range(first, first + documents)
    ]


def segments(dataset, split):
    """Returns (A, B, is_random) of every instance, as text."""
    size = dataset.size(split)
    if not size:
        return []
    arrays = dataset.instances(split, np.arange(size))
    result = []
    for ids, types, maskable, label in zip(
        arrays["input_ids"], arrays["token_type_ids"], arrays["maskable"], arrays["is_random_next"], strict=True
    ):
        a, b = (dataset.tokenizer.decode(ids[maskable & (types == side)]) for side in (0, 1))
        result.append((a, b, bool(label)))
    return result


def documents_of(dataset, split):
    """Returns the names, of five letters, of the `numbered` documents in A and in real B segments."""
    found = set()
    for a, b, is_random in segments(dataset, split):
        for text in (a,) if is_random else (a, b):
            found |= names_in(text)
    return found


def names_in(text):
    letters = text.split()
    return {"".join(letters[at : at + 5]) for at in range(0, len(letters) - 6, 7)}


# --- The same bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slice_bytes", [2000, 5000, 30_000])
def test_slices_do_not_matter(whole, corpus_file, tokenizer, tmp_path, slice_bytes, monkeypatch):
    plan = corpus.plan
    sliced = []

    def cut(inputs, options):
        sliced.extend(plan(inputs, options, slice_bytes))
        return sliced

    monkeypatch.setattr(corpus, "plan", cut)
    run(corpus_file, tokenizer, tmp_path / "data", bucket_tokens=4096, dupe_factor=2, max_document_bytes=slice_bytes)
    assert len(sliced) > 3
    assert files(tmp_path / "data") == files(whole)


@pytest.mark.parametrize(("order", "workers"), [(1, 3), (-1, 1)])
def test_files_their_order_and_workers_do_not_matter(whole, corpus_file, tokenizer, tmp_path, order, workers):
    documents = corpus_file.read_text().strip().split("\n\n")
    inputs = []
    for number in range(4):
        inputs.append(tmp_path / f"{number}.txt.gz")
        inputs[-1].write_bytes(gzip.compress("\n\n".join(documents[number::4]).encode()))
    run(inputs[::order], tokenizer, tmp_path / "data", bucket_tokens=4096, dupe_factor=2, workers=workers)
    assert files(tmp_path / "data") == files(whole)
    assert len(list(whole.glob("train-*"))) > 3


def test_slices_do_not_matter_where_a_document_is_repeated(tokenizer, tmp_path):
    """The two lowest hashes determine the smallest eval split: duplicates of one must not hide the other."""
    documents = numbered(12)
    results = set()
    for name, order in (("spread", documents * 6), ("together", [d for d in documents for _ in range(6)])):
        for pieces in (1, 4):
            folder = tmp_path / f"{name}{pieces}"
            folder.mkdir()
            size = len(order) // pieces
            inputs = [write(folder / f"{i}.txt", order[i * size : (i + 1) * size]) for i in range(pieces)]
            data = run(inputs, tokenizer, folder / "data", eval_fraction=0.001)
            results.add(data.info.hash)
            assert len(documents_of(data, "eval")) == 2
    assert len(results) == 1


# --- Which documents go where -----------------------------------------------------------------------------------


def test_every_document_is_on_one_side_and_nothing_is_lost(tokenizer, tmp_path):
    names = ["".join(lines[0].split()[:5]) for lines in numbered(200)]
    data = run(write(tmp_path / "a.txt", numbered(200)), tokenizer, tmp_path / "data", seq_len=128, short_seq_prob=0.0)
    train, held_out = documents_of(data, "train"), documents_of(data, "eval")
    assert train | held_out == set(names)
    assert not train & held_out
    assert len(held_out) == data.info.splits["eval"].documents
    # A document has four sentences of seven tokens: nothing is cut off, so every sentence is in some pair.
    everything = " / ".join(
        text for split in ("train", "eval") for a, b, random in segments(data, split)
        for text in ((a,) if random else (a, b))
    )  # fmt: skip
    for lines in numbered(200):
        assert all(line in everything for line in lines)
    # Nor does a random B reach over to the other side.
    for split, own in (("train", train), ("eval", held_out)):
        for _, b, _ in segments(data, split):
            assert names_in(b) <= own


def test_held_out_documents_stay_held_out(tokenizer, tmp_path):
    write(tmp_path / "a.txt", numbered(300))
    write(tmp_path / "b.txt", numbered(900, first=300))
    before = run(tmp_path / "a.txt", tokenizer, tmp_path / "few")
    after = run([tmp_path / "b.txt", tmp_path / "a.txt"], tokenizer, tmp_path / "many", bucket_tokens=2048, seed=5)
    assert documents_of(before, "eval") < documents_of(after, "eval")
    assert documents_of(before, "train") < documents_of(after, "train")


# --- Instances --------------------------------------------------------------------------------------------------


def test_dupe_factor(corpus_file, tokenizer, tmp_path):
    one = run(corpus_file, tokenizer, tmp_path / "1")
    five = run(corpus_file, tokenizer, tmp_path / "5", dupe_factor=5)
    assert five.size("train") == pytest.approx(5 * one.size("train"), rel=0.05)
    assert five.info.splits["train"].tokens == one.info.splits["train"].tokens
    pairs = segments(five, "train")
    assert len(set(pairs)) > 0.9 * len(pairs)  # drawn again, not copied
    # The first pass is the one of a dataset with a single pass.
    assert not Counter(segments(one, "train")) - Counter(pairs)
    ids = five.instances("train", np.arange(five.size("train")))["instance_ids"]
    assert len(np.unique(ids)) == len(ids)


@pytest.mark.parametrize(("hashes", "copies"), [([2, 0, 1], [2, 1, 1]), ([3], [70_000])])
def test_ids_of_equal_documents_are_unique(hashes, copies):
    job = SimpleNamespace(options=PrepareOptions(pairs="none"), seed=0)
    hashes = np.repeat(np.array(hashes, np.uint64), copies)
    documents = [[4 * number, 4 * number + 4] for number in range(len(hashes))]
    ids, _, _ = shards._make_instances(job, shards.Bucket("train", "x", (0, 1), (0, 9)), documents, hashes)
    assert len(np.unique(ids)) == len(ids) >= len(documents)


def test_text_without_a_token_is_dropped(tokenizer, tmp_path):
    documents = [["\u200b"], ["the ship ."], ["\u200b", "a wave ."]]
    data = run(write(tmp_path / "a.txt", documents), tokenizer, tmp_path / "data", eval_fraction=0.0)
    assert (data.info.splits["train"].documents, data.info.splits["train"].sentences) == (2, 2)


# --- Failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\n\n \n", "\u200b\n"])
def test_no_text(tokenizer, tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(InputError, match=r"input=.*a\.txt"):
        run(tmp_path / "a.txt", tokenizer, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_all_held_out(tokenizer, tmp_path):
    write(tmp_path / "a.txt", numbered(2))
    with pytest.raises(InputError, match="eval_fraction="):
        run(tmp_path / "a.txt", tokenizer, tmp_path / "data", eval_fraction=1 - 2**-53)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"seq_len": 7}, {"seq_len": 40_000}, {"dupe_factor": 0}, {"short_seq_prob": 1.1}, {"eval_fraction": 1.0},
        {"eval_fraction": -0.1}, {"eval_fraction": float("nan")}, {"bucket_tokens": 10}, {"bucket_tokens": 1 << 31},
        {"sentences": "words"},
        {"max_line_repeats": -1}, {"allow_unk": 20}, {"allow_unk": float("nan")},
        *({name: value, "ids_field": "ids"} for name, value in {
            "text_field": "body", "documents": "file", "errors": "replace", "sentences": "lines", "language": "de",
        }.items()),
    ],
)  # fmt: skip
def test_bad_options(options):
    with pytest.raises(InputError, match=next(iter(options))):
        PrepareOptions(**options)


# --- Filters -----------------------------------------------------------------------------------------------------


def documents(count, seed=0):
    return helpers.make_corpus(documents=count, seed=seed).strip().split("\n\n")


def filtered(texts, tokenizer, folder, workers=1, **options):
    folder.mkdir(exist_ok=True)
    inputs = []
    for number in range(3):
        path = folder / f"{number}.txt"
        path.write_text("\n\n".join(texts[number::3]) + "\n")
        inputs.append(str(path))
    return preparing.run(inputs, tokenizer, folder / "data", workers=workers, **{"bucket_tokens": 2048, **options})


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
    plain = filtered(once, tokenizer, tmp_path / "once")
    kept = filtered([*once, *once[:50], *once[:20]], tokenizer, tmp_path / "kept")
    assert totals(kept)[0][0] == 270
    assert set(kept.info.dropped.values()) == {Counts()}
    dropped = filtered([*once, *once[:50], *once[:20]], tokenizer, tmp_path / "dropped", drop_duplicates=True)
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
    clean = filtered(noisy, tokenizer, tmp_path / "clean", workers, max_line_repeats=5)
    expected = [*(f"{text}\nthe baker is in the harbour and the storm ." for text in plain[:5]), *plain[5:]]
    assert clean.info.dropped["repeated_lines"].sentences == 120
    assert totals(clean)[0] == totals(filtered(expected, tokenizer, tmp_path / "expected"))[0]
    stricter = filtered(noisy, tokenizer, tmp_path / "stricter", max_line_repeats=4)
    assert stricter.info.dropped["repeated_lines"].sentences == 125


# --- Filters together -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_lines_are_counted_in_distinct_documents(workers, tokenizer, tmp_path):
    """A repeated article stays once, since its lines repeat only because it does."""
    plain = documents(40)
    article = "the ship hears a storm . alpha\nthe baker finds the menu . beta"
    noisy = [*plain, *[f"the menu near the owl .\n{text}" for text in plain[:9]], *[article] * 13]
    both = filtered(noisy, tokenizer, tmp_path / "both", workers, drop_duplicates=True, max_line_repeats=8)
    assert both.info.dropped["duplicate_documents"].documents == 12
    assert both.info.dropped["repeated_lines"].sentences == 9
    assert totals(both)[0][0] == 40 + 9 + 1
    lines_alone = filtered(noisy, tokenizer, tmp_path / "lines", workers, max_line_repeats=8)
    assert lines_alone.info.dropped["repeated_lines"].documents == 13


@pytest.mark.parametrize(("articles", "held_out"), [(12, 2), (4, 2), (3, 0)])
def test_the_eval_split_has_two_documents_of_those_that_the_filters_keep(articles, held_out, tokenizer, tmp_path):
    """The lowest hashes are those of dropped documents in most corpora."""
    kept = documents(300)[:articles]
    texts = [*kept, *["the owl sees a menu .\n" * (n + 2) for n in range(100)]]
    data = filtered(texts, tokenizer, tmp_path, eval_fraction=1e-9, max_line_repeats=4)
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
    info = filtered(texts, tokenizer, tmp_path, workers, pairs="none", **{"eval_fraction": 0.02} | limits).info
    lost = {rule: counts.documents for rule, counts in info.dropped.items() if counts.documents}
    assert lost == dropped
    kept = [Counts(0, split.sentences, split.tokens) for split in info.splits.values()]
    assert replace(sum(info.dropped.values(), sum(kept, Counts())), documents=0) == replace(info.corpus, documents=0)
    assert 0 < info.splits["eval"].tokens < 0.1 * info.corpus.tokens


def test_filters_that_drop_everything_are_named(tokenizer, tmp_path):
    with pytest.raises(InputError, match=r"^(?!.*eval_fraction).* max_line_repeats="):
        filtered(documents(5) * 2, tokenizer, tmp_path, max_line_repeats=1)
    assert not (tmp_path / "data").exists()
