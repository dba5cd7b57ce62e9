import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import helpers

from bert_jax.data.preparation.instances import Instance, make_ordered_pairs, make_pairs, make_rng, make_singles
from bert_jax.errors import InputError

Texts = list[list[list[int]]]  # documents of sentences of tokens


# --- On lists of tokens -----------------------------------------------------------------------------------------


def shorten(a: list[int], b: list[int], limit: int, rng: random.Random) -> None:
    while len(a) + len(b) > limit:
        victim = b if len(b) >= len(a) else a
        victim.pop(0 if rng.random() < 0.5 else -1)


# --- Helpers ----------------------------------------------------------------------------------------------------


def offsets(texts: Texts) -> tuple[list[list[int]], np.ndarray]:
    documents, tokens = [], []
    for text in texts:
        bounds = [len(tokens)]
        for sentence in text:
            tokens += sentence
            bounds.append(len(tokens))
        documents.append(bounds)
    return documents, np.array(tokens)


def make_texts(rng: random.Random, documents: int, sentences: tuple[int, int], tokens: tuple[int, int]) -> Texts:
    """Tokens are distinct, so that each segment identifies its source."""
    count = iter(range(10**9))
    return [
        [[next(count) for _ in range(rng.randint(*tokens))] for _ in range(rng.randint(*sentences))]
        for _ in range(documents)
    ]


def realistic(seed: int, lone: float = 0.3, documents: int = 2000) -> Texts:
    """Returns documents of 2 to 30 sentences of 3 to 60 tokens; a share `lone` have one sentence."""
    rng = random.Random(seed)
    texts = make_texts(rng, documents, (2, 30), (3, 60))
    return [text[:1] if rng.random() < lone else text for text in texts]


def run(texts: Texts, rng: random.Random, **options) -> list[list[Instance]]:
    return make_pairs(offsets(texts)[0], rng=rng, **options)


# --- The paper's rule -------------------------------------------------------------------------------------------


def paper_pairs(texts, number, seq_len, short_seq_prob, rng, owed: list[int]) -> list:
    """Implements the paper's rule on lists of tokens; `owed` holds the count of forced random B not compensated."""
    text, limit, target = texts[number], seq_len - 3, seq_len - 3
    if rng.random() < short_seq_prob:
        target = rng.randint(2, limit)

    def flat(sentences: list[list[int]]) -> list[int]:
        return [token for sentence in sentences for token in sentence]

    pairs: list = []
    start = end = 0  # the chunk is text[start:end]
    while end < len(text):
        end += 1
        if end < len(text) and len(flat(text[start:end])) < target:
            continue
        middle = start + (rng.randint(1, end - start - 1) if end - start > 1 else 1)
        heads = rng.random() < 0.5
        if len(text) == 1:
            owed[0] += not heads
            is_random = True
        else:
            is_random = heads and not owed[0]
            owed[0] -= heads and owed[0] > 0
        a = flat(text[start:middle])
        if is_random:
            for _ in range(10):
                other = rng.randint(0, len(texts) - 1)
                if other != number:
                    break
            b: list[int] = []
            for sentence in texts[other][rng.randint(0, len(texts[other]) - 1) :]:
                b = b + sentence
                if len(b) >= target - len(a):
                    break
            end = middle
        elif middle < end:
            b = flat(text[middle:end])
        elif end < len(text):  # a lone sentence, which is all of the target, goes on with the next
            end += 1
            b = flat(text[middle:end])
        else:  # the last of all is what the one before it goes on with
            a, b = list(text[start - 1]), a
        shorten(a, b, limit, rng)
        pairs.append((a, b, is_random))
        start = end
    return pairs


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32), documents=st.integers(1, 12), sentences=st.integers(1, 12),
    tokens=st.sampled_from([1, 5, 20, 80]), seq_len=st.sampled_from([8, 16, 64, 128]),
    short_seq_prob=st.sampled_from([0.0, 0.1, 1.0]),
)  # fmt: skip
def test_paper_is_a_plain_port_of_it(seed, documents, sentences, tokens, seq_len, short_seq_prob):
    texts = make_texts(random.Random(seed), documents, (1, sentences), (1, tokens))
    expected_rng, rng, owed = random.Random(seed + 1), random.Random(seed + 1), [0]
    expected = [paper_pairs(texts, n, seq_len, short_seq_prob, expected_rng, owed) for n in range(len(texts))]
    found = run(texts, rng, seq_len=seq_len, short_seq_prob=short_seq_prob)
    flat = offsets(texts)[1].tolist()
    assert expected == [
        [(flat[i.a_start : i.a_stop], flat[i.b_start : i.b_stop], i.is_random_next) for i in pairs] for pairs in found
    ]
    assert rng.getstate() == expected_rng.getstate()


@pytest.mark.parametrize("lone", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("seq_len", [pytest.param(32, marks=pytest.mark.long), 128, 512])
def test_paper_half_of_all_pairs_are_random(lone, seq_len):
    texts = realistic(seq_len, lone)
    labels = [
        pair.is_random_next
        for pairs in run(texts, random.Random(1), seq_len=seq_len, short_seq_prob=0.1)
        for pair in pairs
    ]
    if seq_len == 512 and lone == 0.8:  # so many lone sentences that no rule could balance them
        assert np.mean(labels) < 0.9
        return
    assert abs(np.mean(labels) - 0.5) < 3 * 0.5 / np.sqrt(len(labels))


@pytest.mark.parametrize("seq_len", [8, 64])
def test_ordered_pairs_are_consecutive_segments_half_of_them_swapped(seq_len: int):
    texts = realistic(7)
    documents, _ = offsets(texts)
    rng = random.Random(1)
    made = list(make_ordered_pairs(documents, seq_len=seq_len, short_seq_prob=0.1, rng=rng))
    assert [len(pairs) == 0 for pairs in made] == [len(text) == 1 for text in texts]
    swapped = 0
    for document, pairs in zip(documents, made, strict=True):
        for pair in pairs:
            first, second = sorted([pair[:2], pair[2:4]])
            assert pair.is_random_next == (pair[:2] != first)
            assert document[0] <= first[0] < first[1] <= second[0] < second[1] <= document[-1]
            assert first[1] - first[0] + second[1] - second[0] <= seq_len - 3
            assert any(first[1] <= end <= second[0] for end in document)
            swapped += pair.is_random_next
    pairs = sum(map(len, made))
    assert abs(swapped / pairs - 0.5) < 3 * 0.5 / np.sqrt(pairs)


# --- Parts ------------------------------------------------------------------------------------------------------


def test_make_rng_is_stable():
    """A change of these values changes the bytes of every dataset."""
    assert make_rng(0, "train", 5).random() == 0.3798760351677407
    assert make_rng("ab", "c").random() != make_rng("a", "bc").random()


# --- Corpora without documents -----------------------------------------------------------------------------------


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
