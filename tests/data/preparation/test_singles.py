"""Corpora without documents: instances of one segment without loss of text, and without next sentences."""

import itertools

import numpy as np
import pytest
from support import helpers

from bert_jax.data.preparation.instances import make_rng, make_singles
from bert_jax.errors import InputError


def document_of(*lengths, start=0):
    return [start, *(start + end for end in itertools.accumulate(lengths))]


def spans(documents, seq_len=12, short_seq_prob=0.0):
    found = list(make_singles(documents, seq_len=seq_len, short_seq_prob=short_seq_prob, rng=make_rng(0)))
    assert all(b_start == b_stop for instances in found for _, _, b_start, b_stop, _ in instances)
    return [[(instance.a_start, instance.a_stop) for instance in instances] for instances in found]


def test_whole_sentences_up_to_the_length():
    assert spans([document_of(3, 4, 3, 5, 6)]) == [[(0, 10), (10, 15), (15, 21)]]
    assert spans([document_of(10), document_of(1, 10, start=50)]) == [[(0, 10)], [(50, 51), (51, 61)]]


def test_a_sentence_longer_than_a_sequence_is_cut():
    assert spans([document_of(3, 25, 2)]) == [[(0, 3), (3, 13), (13, 23), (23, 30)]]
    assert spans([document_of(20)]) == [[(0, 10), (10, 20)]]


def test_nothing_is_lost():
    rng = np.random.default_rng(0)
    documents = [document_of(*rng.integers(1, 30, rng.integers(1, 20)).tolist()) for _ in range(300)]
    for prob in (0.0, 0.5):
        for document, found in zip(documents, spans(documents, short_seq_prob=prob), strict=True):
            assert found[0][0] == document[0]
            assert found[-1][1] == document[-1]
            assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
            assert all(0 < stop - start <= 10 for start, stop in found)
    lengths = {stop - start for found in spans(documents, short_seq_prob=1.0) for start, stop in found}
    assert min(lengths) < 4


@pytest.fixture(scope="module")
def singles_dir(tmp_path_factory, vocabulary_file):
    """Writes a file of independent lines, such as queries."""
    folder = tmp_path_factory.mktemp("singles")
    lines = helpers.make_corpus(documents=200).replace("\n\n", "\n")
    (folder / "lines.txt").write_text(lines)
    helpers.prepare_dataset(folder / "lines.txt", vocabulary_file, folder / "data", pairs="none", eval_fraction=0.0,
                            short_seq_prob=0.0)  # fmt: skip
    return folder / "data"


def test_pretraining_wants_no_nsp(singles_dir):
    with pytest.raises(InputError, match=r"objective\.nsp=False"):
        helpers.open_phases(helpers.small_config(singles_dir))
    helpers.open_phases(helpers.small_config(singles_dir, objective__nsp=False, data__packing=True))
