import random
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data.preparation.instances import Instance, make_pairs, make_rng, target_length, truncate_pair

Texts = list[list[list[int]]]  # documents of sentences of tokens


# --- The reference, on lists of tokens --------------------------------------------------------------------------


def shorten(a: list[int], b: list[int], limit: int, rng: random.Random) -> None:
    while len(a) + len(b) > limit:
        victim = b if len(b) >= len(a) else a
        victim.pop(0 if rng.random() < 0.5 else -1)


def reference_pairs(texts: Texts, number: int, seq_len: int, short_seq_prob: float, rng: random.Random) -> list:
    text, limit, target = texts[number], seq_len - 3, seq_len - 3
    if rng.random() < short_seq_prob:
        target = rng.randint(2, limit)
    pairs: list = []
    chunk: list[list[int]] = []
    at = 0
    while at < len(text):
        chunk.append(text[at])
        at += 1
        if at < len(text) and sum(map(len, chunk)) < target:
            continue
        in_a = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
        a = [token for sentence in chunk[:in_a] for token in sentence]
        lone = len(chunk) == 1
        is_random = lone or rng.random() < 0.5
        if is_random:
            b: list[int] = []
            tries = 0
            while tries < 10:
                other = rng.randint(0, len(texts) - 1)
                tries += 1
                if other != number:
                    break
            for sentence in texts[other][rng.randint(0, len(texts[other]) - 1) :]:
                b = b + sentence
                if len(b) >= target - len(a):
                    break
            at -= len(chunk) - in_a
        else:
            b = [token for sentence in chunk[in_a:] for token in sentence]
        shorten(a, b, limit, rng)
        pairs.append((a, b, is_random))
        chunk = []
    return pairs


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


def document_of(texts: Texts) -> np.ndarray:
    return np.repeat(np.arange(len(texts)), [sum(map(len, text)) for text in texts])


# --- The reference's rule ---------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    documents=st.integers(1, 12),
    sentences=st.integers(1, 12),
    tokens=st.sampled_from([1, 5, 20, 80]),
    seq_len=st.sampled_from([8, 16, 64, 128]),
    short_seq_prob=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_reference_is_the_reference(seed, documents, sentences, tokens, seq_len, short_seq_prob):
    texts = make_texts(random.Random(seed), documents, (1, sentences), (1, tokens))
    expected_rng, rng = random.Random(seed + 1), random.Random(seed + 1)
    expected = [reference_pairs(texts, number, seq_len, short_seq_prob, expected_rng) for number in range(len(texts))]
    found = run(texts, rng, seq_len=seq_len, short_seq_prob=short_seq_prob, random_next="reference")
    flat = offsets(texts)[1].tolist()
    content = [
        [(flat[i.a_start : i.a_stop], flat[i.b_start : i.b_stop], i.is_random_next) for i in pairs] for pairs in found
    ]
    assert content == expected
    assert rng.getstate() == expected_rng.getstate()


def test_reference_yields_more_random_pairs_than_real_ones():
    pairs = list(
        chain.from_iterable(
            run(realistic(0), random.Random(0), seq_len=128, short_seq_prob=0.1, random_next="reference")
        )
    )
    assert 0.54 < np.mean([pair.is_random_next for pair in pairs]) < 0.65


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
    found = run(texts, rng, seq_len=seq_len, short_seq_prob=short_seq_prob, random_next="paper")
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
        for pairs in run(texts, random.Random(1), seq_len=seq_len, short_seq_prob=0.1, random_next="paper")
        for pair in pairs
    ]
    if seq_len == 512 and lone == 0.8:  # so many lone sentences that no rule could balance them
        assert np.mean(labels) < 0.9
        return
    assert abs(np.mean(labels) - 0.5) < 3 * 0.5 / np.sqrt(len(labels))


@pytest.mark.parametrize("rule", ["paper", "reference"])
@pytest.mark.parametrize("seq_len", [8, 64, 512])
def test_real_b_follows_a_and_random_b_is_from_elsewhere(rule, seq_len, monkeypatch):
    texts = realistic(3, documents=500)
    owner = document_of(texts)
    drawn = []
    monkeypatch.setattr(
        "bert_jax.data.preparation.instances.truncate_pair", lambda pair, *_: drawn.append(pair) or pair
    )
    found = run(texts, random.Random(4), seq_len=seq_len, short_seq_prob=0.1, random_next=rule)
    starts = {bounds[0] for bounds in offsets(texts)[0]}
    sentence_bounds = {bound for bounds in offsets(texts)[0] for bound in bounds}
    assert drawn == list(chain.from_iterable(found))
    for number, pairs in enumerate(found):
        for pair in pairs:
            assert pair.a_start < pair.a_stop
            assert pair.b_start < pair.b_stop
            assert sentence_bounds.issuperset(pair[:4])
            assert owner[pair.a_start] == owner[pair.a_stop - 1] == number
            assert owner[pair.b_start] == owner[pair.b_stop - 1]
            if pair.is_random_next:
                assert owner[pair.b_start] != number
            else:
                assert pair.b_start == pair.a_stop
                assert owner[pair.b_start] == number
                assert pair.b_start not in starts


@pytest.mark.parametrize("rule", ["paper", "reference"])
@pytest.mark.parametrize("seq_len", [8, 9, 64, 128])
@pytest.mark.parametrize("short_seq_prob", [0.0, 0.1, 1.0])
def test_lengths(rule, seq_len, short_seq_prob):
    texts = realistic(5, documents=300)
    for pairs in run(texts, random.Random(6), seq_len=seq_len, short_seq_prob=short_seq_prob, random_next=rule):
        assert pairs  # every document is used
        for pair in pairs:
            len_a, len_b = pair.a_stop - pair.a_start, pair.b_stop - pair.b_start
            assert len_a >= 1
            assert len_b >= 1
            assert len_a + len_b <= seq_len - 3


@pytest.mark.parametrize("rule", ["paper", "reference"])
@pytest.mark.parametrize("seq_len", [8, 16, 128])
def test_no_sentence_is_lost_before_truncation(rule, seq_len, monkeypatch):
    monkeypatch.setattr("bert_jax.data.preparation.instances.truncate_pair", lambda pair, *_: pair)
    texts = make_texts(random.Random(7), 300, (1, 40), (1, 12))
    tokens = offsets(texts)[1]
    found = run(texts, random.Random(8), seq_len=seq_len, short_seq_prob=0.1, random_next=rule)
    times = np.zeros(len(tokens), int)
    for pairs in found:
        for pair in pairs:
            times[pair.a_start : pair.a_stop] += 1
            if not pair.is_random_next:
                times[pair.b_start : pair.b_stop] += 1
    assert times.min() == 1
    if rule == "reference":
        assert times.max() == 1
    else:  # a lone sentence at a document's end may be the B of one that stood in a pair already
        assert times.max() <= 2
        assert (times == 2).sum() <= sum(max(map(len, text)) for text in texts)


def test_one_document_is_its_own_stranger():
    texts = make_texts(random.Random(9), 1, (20, 20), (5, 5))
    for rule in ("paper", "reference"):
        pairs = list(
            chain.from_iterable(run(texts, random.Random(10), seq_len=32, short_seq_prob=0.1, random_next=rule))
        )
        assert pairs
        assert any(pair.is_random_next for pair in pairs)


def test_lone_sentences_alone_are_all_random():
    pairs = list(
        chain.from_iterable(
            run(realistic(11, lone=1.0, documents=50), make_rng(0), seq_len=64, short_seq_prob=0.1, random_next="paper")
        )
    )
    assert len(pairs) == 50
    assert all(pair.is_random_next for pair in pairs)


# --- Parts ------------------------------------------------------------------------------------------------------


def test_target_lengths():
    rng = random.Random(12)
    drawn = np.array([target_length(67, 0.1, rng) for _ in range(100_000)])
    short = drawn[drawn < 64]
    # A short length may also be the full one: 1 in 63.
    expected = 0.1 * 62 / 63
    assert abs(len(short) / len(drawn) - expected) < 4 * np.sqrt(expected * (1 - expected) / len(drawn))
    assert drawn.max() == 64
    counts = np.bincount(short, minlength=64)[2:]
    assert counts.min() > 0
    assert short.min() == 2
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi_square < 61 + 6 * np.sqrt(2 * 61)
    assert {target_length(67, 0.0, rng) for _ in range(1000)} == {64}


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(5, 60), st.integers(0, 1000))
def test_truncation_takes_from_the_longer(len_a, len_b, limit, seed):
    pair = truncate_pair(Instance(100, 100 + len_a, 200, 200 + len_b, True), limit, random.Random(seed))
    a, b = pair.a_stop - pair.a_start, pair.b_stop - pair.b_start
    assert 100 <= pair.a_start < pair.a_stop <= 100 + len_a
    assert 200 <= pair.b_start < pair.b_stop <= 200 + len_b
    assert pair.is_random_next
    assert a + b == min(limit, len_a + len_b)
    if len_a + len_b > limit:
        shorter = min(len_a, len_b)
        assert min(a, b) == min(shorter, limit // 2)
        assert b <= a or b < len_b or len_b > len_a  # at a tie B gives


def test_truncation_takes_from_both_ends():
    fronts = [truncate_pair(Instance(0, 10, 10, 110, False), 100, random.Random(s)).b_start - 10 for s in range(2000)]
    assert abs(np.mean(fronts) - 5) < 0.2
    assert truncate_pair(Instance(0, 4, 4, 8, False), 7, random.Random(0))[:2] == (0, 4)


def test_make_rng_is_stable():
    """A change of these values changes the bytes of every dataset."""
    assert make_rng(0, "train", 5).random() == 0.3798760351677407
    assert make_rng("ab", "c").random() != make_rng("a", "bc").random()
