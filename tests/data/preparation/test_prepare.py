import gzip
from collections import Counter

import numpy as np
import pytest
from support.preparing import files, run

from bert_jax.data.corpora import corpus
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
        {"eval_fraction": -0.1}, {"eval_fraction": float("nan")}, {"bucket_tokens": 10}, {"sentences": "words"},
        {"max_line_repeats": -1}, {"allow_unk": 20}, {"allow_unk": float("nan")},
    ],
)  # fmt: skip
def test_bad_options(options):
    with pytest.raises(InputError, match=next(iter(options))):
        PrepareOptions(**options)
