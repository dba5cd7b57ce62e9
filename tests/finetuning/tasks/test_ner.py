"""Named entities: CoNLL files, schemes, and scores as conlleval and seqeval give them."""

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from bert_jax.errors import InputError
from bert_jax.finetuning.task import BadRows, Split
from bert_jax.finetuning.tasks.ner import (
    NerTask,
    TaggedSentence,
    TagWindow,
    encode_windows,
    entity_scores,
    entity_spans,
    to_bio,
    write_conll,
)
from bert_jax.text.conversion import convert_vocabulary
from bert_jax.text.tokenizer import Tokenizer

CONTROL = "\u200b\u0007"  # has no piece
CONLL = """-DOCSTART- -X- -X- O

U.N. NNP I-NP I-ORG
official NN I-NP O
Ekeus NNP I-NP I-PER

Peter NNP I-NP I-PER
Blackburn NNP I-NP B-PER

-DOCSTART- -X- O O
BRUSSELS\u00a0X NNP I-NP I-LOC
"""


def write(path: Path, content: str) -> Path:
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    return path


def read(path: Path, bad_rows: BadRows | None = None, *, labels: str = "required", **settings) -> list[TaggedSentence]:
    return NerTask(**settings).read(str(path), bad_rows or BadRows(strict=True), labels=labels)


def random_tags(rng: random.Random, prefixes: str) -> list[str]:
    def tag() -> str:
        return "O" if rng.random() < 0.3 else f"{rng.choice(prefixes)}-{rng.choice(('PER', 'LOC', 'A-B'))}"

    return [tag() for _ in range(rng.randrange(1, 9))]


def test_conll_2003(tmp_path: Path):
    path = write(tmp_path / "eng.train", CONLL)
    assert read(path) == [
        TaggedSentence(("U.N.", "official", "Ekeus"), ("B-ORG", "O", "B-PER"), 0, "1"),
        TaggedSentence(("Peter", "Blackburn"), ("B-PER", "B-PER"), 0, "2"),
        TaggedSentence(("BRUSSELS\u00a0X",), ("B-LOC",), 1, "3"),
    ]


def test_tabs_and_files_without_documents(tmp_path: Path):
    path = write(tmp_path / "a.conll", "New York\tB-loc\r\n!\tO\r\n\t\r\n\r\n\r\nEmpire\tB-a\r\nState\tI-a\r\n")
    assert read(path) == [
        TaggedSentence(("New York", "!"), ("B-loc", "O"), 0, "1"),
        TaggedSentence(("Empire", "State"), ("B-a", "I-a"), 1, "2"),
    ]


def test_words_to_be_tagged(tmp_path: Path):
    path = write(tmp_path / "a", "Peter\nruns ?\n\nhe\n")
    untagged = [TaggedSentence(("Peter", "runs"), None, 0, "1"), TaggedSentence(("he",), None, 1, "2")]
    assert read(path, labels="ignored") == untagged
    path = write(tmp_path / "a", "Peter B-A\n\nhe\n")
    assert [sentence.tags for sentence in read(path, labels="optional")] == [("B-A",), None]


@pytest.mark.parametrize(
    "name", ["a.conll", "a.txt.conll", "a.tsv", "test.txt", "table.csv", "rows.jsonl", "lines.txt", "lines.txt.gz"]
)
def test_files_to_predict_have_a_word_a_line_unless_a_column_is_named(tmp_path: Path, name: str):
    path = write(tmp_path / name, "my\nold ship\n")
    if name in ("a.conll", "a.txt.conll", "a.tsv", "test.txt"):
        (sentence,) = read(path, labels="ignored")
        assert sentence.words == ("my", "old")
    else:
        with pytest.raises(InputError, match=rf"{name}: .*\.conll.*--text"):
            read(path, labels="ignored")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("Peter", "'Peter' has no tag"),
        ("Peter\t", "''"),
        ("\tO", "no word"),
        ("Peter X-PER", "'X-PER'"),
        ("Peter B-", "'B-'"),
        ("Sm\udcefth I-PER", "UTF-8.*0xef"),
    ],
)
def test_a_sentence_with_a_bad_line_is_skipped_and_keeps_its_number(tmp_path: Path, line: str, problem: str):
    path = write(tmp_path / "a.conll", f"a O\n\nb O\n{line}\n{line}\n\nc O\n")
    bad_rows = BadRows()
    assert [(sentence.id, sentence.words) for sentence in read(path, bad_rows)] == [("1", ("a",)), ("3", ("c",))]
    assert bad_rows.counts == {str(path): 1}
    with pytest.raises(InputError, match=rf"^{path}:3: .*{problem}"):
        read(path)


def test_files_without_a_sentence_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"\ba: "):
        read(write(tmp_path / "a", "\n\n"))
    with pytest.raises(InputError, match=r"\ba: "):
        read(write(tmp_path / "a", "a B\n"), BadRows())
    with pytest.raises(InputError, match=r"\bb: "):
        read(tmp_path / "b")


@pytest.mark.parametrize("prefixes", ["I", "BI", "BIES"])
def test_scores_are_seqevals(prefixes: str):
    seqeval = pytest.importorskip("seqeval.metrics")
    rng = random.Random(prefixes)
    for _ in range(100):
        gold = [random_tags(rng, prefixes) for _ in range(rng.randrange(1, 6))]
        predicted = [[tag if rng.random() < 0.6 else random_tags(rng, prefixes)[0] for tag in tags] for tags in gold]
        scores = entity_scores(gold, predicted)
        with warnings.catch_warnings(action="ignore"):
            report = seqeval.classification_report(gold, predicted, output_dict=True, zero_division=0)
        micro = report.pop("micro avg", {"precision": 0, "recall": 0, "f1-score": 0})
        expected = {"f1": micro["f1-score"], "precision": micro["precision"], "recall": micro["recall"]}
        by_type = {f"f1_{kind}": report[kind]["f1-score"] for kind in report.keys() - {"macro avg", "weighted avg"}}
        assert scores == pytest.approx({**expected, **by_type})


def test_bio_by_hand():
    bio = ["B-A", "I-A", "B-A", "O", "B-B", "I-B", "I-B", "B-A"]
    assert to_bio(["I-A", "I-A", "B-A", "O", "I-B", "I-B", "I-B", "I-A"]) == bio  # IOB1
    assert to_bio(["B-A", "E-A", "S-A", "O", "B-B", "I-B", "E-B", "S-A"]) == bio  # BIOES
    assert to_bio(["B-A", "L-A", "U-A", "O", "B-B", "I-B", "L-B", "U-A"]) == bio  # BILOU


def test_a_tag_without_a_prefix_is_inside():
    """Models of `transformers` may have such tags."""
    assert entity_spans(["PER", "PER", "O", "LOC", "PER"]) == [("PER", 0, 2), ("LOC", 3, 4), ("PER", 4, 5)]


def test_predictions_as_conlleval_reads_them(tmp_path: Path):
    sentences = [TaggedSentence(("a", "b"), ("B-A", "O"), 0, "1"), TaggedSentence(("c",), ("O",), 0, "2")]
    write_conll(epath.Path(tmp_path / "out"), sentences, [["B-A", "I-A"], ["O"]])
    assert (tmp_path / "out").read_text() == "a B-A B-A\nb O I-A\n\nc O O\n\n"
    assert [sentence.tags for sentence in read(tmp_path / "out")] == [("B-A", "I-A"), ("O",)]
    write_conll(epath.Path(tmp_path / "out"), [TaggedSentence(("a b",), None, 0, "1")], [["O"]])
    assert (tmp_path / "out").read_text() == "a b\tO\n\n"


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
    for seed in range(20):
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


def test_a_long_sentence_gives_every_word_a_quarter_of_a_window_on_both_sides(tokenizer: Tokenizer):
    room, words = 20, ["ship", "wave", "moon"] * 15
    for length in range(21, 46):
        windows = encode_windows(tokenizer, [sentence(*words[:length])], room + 2)
        assert len(windows) == -(-length // (room // 2))
        for window in windows:
            assert len(window.sequence.input_ids) == room + 2
            for _, word, position in window.words:
                assert position - 1 >= min(word, room // 4)
                assert room - position >= min(length - 1 - word, room // 4)


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


@pytest.mark.parametrize(
    ("length", "read"), [(8, "the ship a zzz"), (10, "the ship a zzz"), (12, "qqqq the ship a zzz")]
)
def test_context_fills_the_window_with_whole_words(tokenizer: Tokenizer, length: int, read: str):
    sentences = [sentence("qqqq", "the"), sentence("ship"), sentence("a", "zzz")]
    (_, window, _) = encode_windows(tokenizer, sentences, length, document_context=True)
    assert words_of(tokenizer, window) == f"[CLS] {read} [SEP]"


def test_words_without_pieces_are_outside(tokenizer: Tokenizer):
    sentences = [sentence("ship", CONTROL, "moon"), sentence(CONTROL), sentence("owl")]
    windows = encode_windows(tokenizer, sentences, 3)
    assert [window.words for window in windows] == [((0, 0, 1),), ((0, 2, 1),), ((2, 0, 1),)]
    task = NerTask(tags=("O", "B-A", "I-A"), max_seq_len=3)
    split = Split("dev", sentences, task.encode(sentences, tokenizer, labelled=False))
    predicted = task.predictions(split, [np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]])] * 3)
    assert [row["prediction"] for row in predicted] == [["B-A", "O", "B-A"], ["O"], ["B-A"]]


def test_types_that_no_sentence_has_score_0(tokenizer: Tokenizer):
    task = NerTask(tags=("O", "B-A", "I-A", "B-B", "I-B"), max_seq_len=3)
    sentences = [TaggedSentence(("ship",), ("B-A",), 0, "")]
    split = Split("dev", sentences, task.encode(sentences, tokenizer, labelled=True))
    scores = task.score(split, [np.array([[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]])])
    assert scores == {"f1": 1.0, "precision": 1.0, "recall": 1.0, "f1_A": 1.0, "f1_B": 0.0}


def test_real_files(data_dir: Path):
    tokenizer = convert_vocabulary(str(data_dir / "vocab" / "bert-base-cased-vocab.txt"))
    counts = {"train": (3_394, 1_975), "dev": (1_009, 836), "test": (1_287, 1_079)}
    task, _ = NerTask(max_seq_len=64).read_training(str(data_dir / "wnut17" / "train.conll"), BadRows(strict=True))
    kinds = ("corporation", "creative-work", "group", "location", "person", "product")
    assert task.metrics == ("f1", "precision", "recall", *(f"f1_{kind}" for kind in kinds))
    for split, (sentences, entities) in counts.items():
        examples = task.read(str(data_dir / "wnut17" / f"{split}.conll"), BadRows(strict=True))
        tags = [sentence.tags or () for sentence in examples]
        assert (len(tags), sum(len(entity_spans(one)) for one in tags)) == (sentences, entities)
        encoded = task.encode(examples, tokenizer, labelled=True)
        perfect = [np.eye(task.size)[labels] for labels in encoded.labels]
        assert task.score(Split(split, examples, encoded), perfect)["f1"] == 1.0
