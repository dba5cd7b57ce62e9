"""Unfinished work of an interrupted run is reused only if none of its inputs has changed."""

import os

import pytest
from support import helpers
from support.preparing import files

from bert_jax.data.corpora import corpus
from bert_jax.data.preparation import pipeline as prepare_module
from bert_jax.data.preparation.pipeline import PrepareOptions, prepare
from bert_jax.text.wordpiece import wordpiece_tokenizer

BEFORE = {"seq_len": 64, "eval_fraction": 0.0}
TEXT = "The owl bzw. The ship. The owl usw. The moon."  # one sentence or several, by language


def change_nothing(path, tokenizer):
    return tokenizer


def other_text_of_the_same_size(path, tokenizer):
    """Keeps the number of tokens, so that the buckets do not change."""
    text = path.read_text()
    path.write_text(text.replace(" owl ", " the "))
    assert path.read_text() != text
    os.utime(path, (1, 1))
    return tokenizer


def more_text(path, tokenizer):
    status = os.stat(path)
    path.write_text(path.read_text() + "\n\nthe ship .\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return tokenizer


def another_vocabulary(path, tokenizer):
    pieces = list(tokenizer.vocab)
    pieces[-2:] = pieces[:-3:-1]
    return wordpiece_tokenizer(pieces, tokenizer.lowercase)


def another_case(path, tokenizer):
    return wordpiece_tokenizer(tokenizer.vocab, not tokenizer.lowercase)


@pytest.mark.parametrize(
    ("change", "options", "seed"),
    [
        (change_nothing, {}, 0),
        (other_text_of_the_same_size, {}, 0),
        (more_text, {}, 0),
        (another_vocabulary, {}, 0),
        (another_case, {}, 0),
        (change_nothing, {}, 1),
        *(
            (change_nothing, {name: value}, 0)
            for name, value in {
                "seq_len": 32, "pairs": "none", "dupe_factor": 2, "short_seq_prob": 0.9, "random_next": "reference",
                "eval_fraction": 0.3, "sentences": "lines", "language": "de", "documents": "file",
                "drop_duplicates": True, "max_line_repeats": 5, "min_document_tokens": 60, "max_document_tokens": 60,
                "bucket_tokens": 1024,
            }.items()
        ),
    ],
)  # fmt: skip
def test_changed_inputs_discard_unfinished_work(change, options, seed, tokenizer, tmp_path, monkeypatch):
    path, data = tmp_path / "a.txt", tmp_path / "data"
    text = helpers.make_corpus(documents=30)
    path.write_text(f"{TEXT}\n\n{text}" + "\n\n" + text.replace("\n\n", f"\n{TEXT}\n", 8))

    def run(folder, tokenizer, seed=0, **options):
        prepare([str(path)], tokenizer, str(folder), PrepareOptions(**{**BEFORE, **options}), seed=seed)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:  # all is done but for the last step
        patch.setattr(prepare_module, "_publish", fail)
        with pytest.raises(OSError, match="No space"):
            run(data, tokenizer)
    now = change(path, tokenizer)
    run(data, now, seed, **options)
    run(tmp_path / "anew", now, seed, **options)
    assert files(data) == files(tmp_path / "anew")


def test_a_fingerprint_tells_files_apart(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    os.utime(path, (1, 1))
    before = corpus.fingerprint(str(path))
    assert corpus.fingerprint(str(path)) == before
    os.utime(path, (2, 2))
    assert corpus.fingerprint(str(path)) != before
    path.write_text("more")
    os.utime(path, (1, 1))
    assert corpus.fingerprint(str(path)) != before
