"""Windows over sentences: each word predicted once, with as much context as there is room for."""

import dataclasses
import itertools
import random
from pathlib import Path

import pytest

from bert_jax.finetuning.rows import BadRows
from bert_jax.finetuning.tasks.ner import NerTask
from bert_jax.finetuning.tasks.ner_windows import TaggedSentence, TagWindow, collect_tags, encode_windows
from bert_jax.text.conversion import convert_vocabulary
from bert_jax.text.tokenizer import Tokenizer, read_tokenizer

CONTROL = "\u200b\u0007"  # has no piece


@pytest.fixture
def tokenizer(vocabulary_file: Path) -> Tokenizer:
    return read_tokenizer(vocabulary_file)


def sentence(*words: str, document: int = 0) -> TaggedSentence:
    return TaggedSentence(words, None, document, "")


def words_of(tokenizer: Tokenizer, window: TagWindow) -> str:
    return tokenizer.decode(window.sequence.input_ids)


def random_sentences(seed: int, longest: int) -> list[TaggedSentence]:
    rng = random.Random(seed)
    documents = sorted(rng.choices(range(4), k=rng.randrange(1, 12)))
    kinds = ("ship", "the", "qq", "qqqqq", "qqqqqqqqqqqqqqqqqqqqqqqqqqqqqq", CONTROL)
    return [
        sentence(*rng.choices(kinds, (9, 9, 9, 5, 1, 1), k=rng.randrange(1, longest)), document=document)
        for document in documents
    ]


def test_a_short_sentence_is_one_window(tokenizer: Tokenizer):
    (window,) = encode_windows(tokenizer, [sentence("the", "qqq", "ship")], 10)
    assert words_of(tokenizer, window) == "[CLS] the qqq ship [SEP]"
    assert window.words == ((0, 0, 1), (0, 1, 2), (0, 2, 5))
    assert window.sequence.first_length == len(window.sequence.input_ids) == 7


@pytest.mark.parametrize("document_context", [False, True])
@pytest.mark.parametrize("max_seq_len", [3, 4, 7, 12, 40])
def test_each_word_is_predicted_once_at_its_first_piece(tokenizer: Tokenizer, max_seq_len: int, document_context: bool):
    for seed in range(60):
        sentences = random_sentences(seed, longest=30)
        windows = encode_windows(tokenizer, sentences, max_seq_len, document_context=document_context)
        predicted = [(number, word) for window in windows for number, word, _ in window.words]
        expected = [
            (number, word)
            for number, words in enumerate(sentences)
            for word, text in enumerate(words.words)
            if text != CONTROL
        ]
        assert predicted == expected
        for window in windows:
            ids = window.sequence.input_ids
            assert len(ids) <= max_seq_len
            assert (ids[0], ids[-1]) == (tokenizer.cls_id, tokenizer.sep_id)
            assert len({sentences[number].document for number, _, _ in window.words}) == 1
            for number, word, position in window.words:
                (pieces,) = tokenizer.encode_batch([sentences[number].words[word]])
                held = ids[position : position + len(pieces)]
                assert held == tuple(pieces) or (len(pieces) > max_seq_len - 2 and ids[position] == pieces[0])


def single(count: int) -> list[str]:
    return ["ship", "wave", "moon"] * (count // 3) + ["ship", "wave", "moon"][: count % 3]


@pytest.mark.parametrize("length", range(21, 90))
def test_a_long_sentence_gives_every_word_a_quarter_of_a_window_on_both_sides(tokenizer: Tokenizer, length: int):
    room = 20
    windows = encode_windows(tokenizer, [sentence(*single(length))], room + 2)
    assert len(windows) == 1 + -(-(length - room) // (room // 2))
    for window in windows:
        assert len(window.sequence.input_ids) == room + 2
        for _, word, position in window.words:
            left, right = position - 1, room - position
            assert left >= min(word, room // 4)
            assert right >= min(length - 1 - word, room // 4 - 1)


def test_words_have_more_context_in_their_window_than_in_the_next(tokenizer: Tokenizer):
    windows = encode_windows(tokenizer, [sentence(*single(50))], 22)
    starts = [window.words[0][1] - (window.words[0][2] - 1) for window in windows]
    assert starts == [0, 10, 20, 30]
    for (window, start), other in itertools.product(zip(windows, starts, strict=True), starts):
        for _, word, _ in window.words:
            mine = min(word - start, start + 19 - word)
            theirs = min(word - other, other + 19 - word)
            assert mine >= theirs - 1


DOCUMENT = [
    sentence("the", "ship"),
    sentence("a", "wave", "sees"),
    sentence("moon"),
    sentence("old", "owl", "."),
    sentence("fox", "near", document=1),
]


@pytest.mark.parametrize(
    ("room", "read"),
    [
        (100, ["the ship a wave sees moon old owl ."] * 4 + ["fox near"]),
        (5, ["the ship a wave sees", "ship a wave sees moon", "wave sees moon old owl", "sees moon old owl .",
             "fox near"]),
        (4, ["the ship a wave", "a wave sees moon", "sees moon old owl", "moon old owl .", "fox near"]),
        (3, ["the ship a", "a wave sees", "sees moon old", "old owl .", "fox near"]),
    ],
)  # fmt: skip
def test_the_context_of_a_document(tokenizer: Tokenizer, room: int, read: list[str]):
    windows = encode_windows(tokenizer, DOCUMENT, room + 2, document_context=True)
    assert [words_of(tokenizer, window)[6:-6] for window in windows] == read
    for number, window in enumerate(windows):
        assert [(one, word) for one, word, _ in window.words] == [
            (number, word) for word in range(len(DOCUMENT[number].words))
        ]
        for _, word, position in window.words:
            assert tokenizer.id_to_token(window.sequence.input_ids[position]) == DOCUMENT[number].words[word]


def test_without_documents_a_sentence_stands_alone(tokenizer: Tokenizer):
    windows = encode_windows(tokenizer, DOCUMENT, 100)
    assert [words_of(tokenizer, window)[6:-6] for window in windows] == [" ".join(one.words) for one in DOCUMENT]


def test_context_fills_the_window_with_whole_words(tokenizer: Tokenizer):
    sentences = [sentence("qqqq", "the"), sentence("ship"), sentence("a", "zzz")]
    (_, window, _) = encode_windows(tokenizer, sentences, 8, document_context=True)
    assert words_of(tokenizer, window) == "[CLS] the ship a zzz [SEP]"
    (_, window, _) = encode_windows(tokenizer, sentences, 9, document_context=True)
    assert words_of(tokenizer, window) == "[CLS] the ship a zzz [SEP]"
    (_, window, _) = encode_windows(tokenizer, sentences, 10, document_context=True)
    assert words_of(tokenizer, window) == "[CLS] the ship a zzz [SEP]"
    (_, window, _) = encode_windows(tokenizer, sentences, 12, document_context=True)
    assert words_of(tokenizer, window) == "[CLS] qqqq the ship a zzz [SEP]"


def test_a_long_sentence_has_the_context_of_its_document(tokenizer: Tokenizer):
    sentences = [sentence("the", "old"), sentence(*single(14)), sentence("fox", "near")]
    windows = encode_windows(tokenizer, sentences, 12, document_context=True)
    texts = [words_of(tokenizer, window)[6:-6].split() for window in windows]
    assert all(len(text) == 10 for text in texts)
    assert texts[1] == ["old", *single(14)[:9]]  # its first seven words are predicted here
    assert texts[2] == [*single(14)[6:], "fox", "near"]


def test_tags_are_collected_and_words_without_pieces_are_outside(tokenizer: Tokenizer):
    sentences = [sentence("ship", CONTROL, "moon"), sentence(CONTROL), sentence("owl")]
    windows = encode_windows(tokenizer, sentences, 3)
    assert [window.words for window in windows] == [((0, 0, 1),), ((0, 2, 1),), ((2, 0, 1),)]
    assert collect_tags(sentences, windows, [["B-A"], ["B-B"], ["B-C"]]) == [["B-A", "O", "B-B"], ["O"], ["B-C"]]
    with pytest.raises(ValueError, match="zip"):
        collect_tags(sentences, windows, [["B-A", "O"], ["B-B"], ["B-C"]])


@pytest.mark.parametrize("document_context", [False, True])
def test_real_files(data_dir: Path, document_context: bool):
    tokenizer = convert_vocabulary(str(data_dir / "vocab" / "bert-base-cased-vocab.txt"))
    sentences = NerTask().read(str(data_dir / "wnut17" / "train.conll"), BadRows(strict=True))
    sentences = [dataclasses.replace(one, document=number // 7) for number, one in enumerate(sentences)]
    windows = encode_windows(tokenizer, sentences, 64, document_context=document_context)
    gold = [[sentences[number].tags[word] for number, word, _ in window.words] for window in windows]
    assert collect_tags(sentences, windows, gold) == [list(one.tags) for one in sentences]
