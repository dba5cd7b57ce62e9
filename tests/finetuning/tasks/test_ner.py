"""Named entities: CoNLL files, schemes, and scores as conlleval and seqeval give them."""

import gzip
import random
import re
import warnings
from collections import Counter
from pathlib import Path

import pytest
from etils import epath

from bert_jax.errors import InputError
from bert_jax.finetuning.rows import BadRows
from bert_jax.finetuning.tasks.ner import (
    EntityScore,
    NerTask,
    entity_scores,
    entity_spans,
    tag_names,
    to_bio,
    write_conll,
)
from bert_jax.finetuning.tasks.ner_windows import TaggedSentence

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
    chunks = read(path, word_column=1, tag_column=2)
    assert chunks[0] == TaggedSentence(("NNP", "NN", "NNP"), ("B-NP", "I-NP", "I-NP"), 0, "1")


def test_tabs_and_files_without_documents(tmp_path: Path):
    path = write(tmp_path / "a.conll", "New York\tB-loc\r\n!\tO\r\n\t\r\n\r\n\r\nEmpire\tB-a\r\nState\tI-a\r\n")
    assert read(path) == [
        TaggedSentence(("New York", "!"), ("B-loc", "O"), 0, "1"),
        TaggedSentence(("Empire", "State"), ("B-a", "I-a"), 1, "2"),
    ]


def test_sentences_before_the_first_document(tmp_path: Path):
    path = write(tmp_path / "a", "a O\n\nb O\n\n-DOCSTART- O\n\nc O\n\nd O\n\n-DOCSTART- O\n\n-DOCSTART- O\n\ne O\n")
    assert [sentence.document for sentence in read(path)] == [0, 1, 2, 2, 4]


def test_words_to_be_tagged(tmp_path: Path):
    path = write(tmp_path / "a", "Peter\nruns ?\n\nhe\n")
    untagged = [TaggedSentence(("Peter", "runs"), None, 0, "1"), TaggedSentence(("he",), None, 1, "2")]
    assert read(path, labels="ignored") == untagged
    path = write(tmp_path / "a", "Peter B-A\n\nhe\n")
    assert [sentence.tags for sentence in read(path, labels="optional")] == [("B-A",), None]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.conll", ["my"]),
        ("a", ["my"]),
        ("train.txt", ["my"]),
        ("Mine.txt.gz", ["my"]),
        ("a.txt", ["my", "group", "O"]),
    ],
)
def test_name_of_a_file_to_predict_says_its_format(tmp_path: Path, name: str, words: list[str]):
    path = tmp_path / name
    with (gzip.open if name.endswith(".gz") else open)(path, "wb") as file:
        file.write(b"my group O\n")
    (sentence,) = read(path, labels="ignored", conll_files=("mine.txt",))
    assert sentence.words == tuple(words)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("Peter", "tag"),
        ("Peter\t", r"tag_column=-1.*\b2\b"),
        ("\tO", r"word_column=0.*\b2\b"),
        ("Peter PER", "'PER'"),
        ("Peter L-PER", "'L-PER'"),
        ("Peter B-", "'B-'"),
        ("Sm\udcefth I-PER", "UTF-8.*0xef"),
    ],
)
def test_a_sentence_with_a_bad_line_is_skipped_and_keeps_its_number(tmp_path: Path, line: str, problem: str):
    path = write(tmp_path / "a.conll", f"a O\n\nb O\n{line}\n{line}\n\nc O\n")
    bad_rows = BadRows()
    assert [(sentence.id, sentence.words) for sentence in read(path, bad_rows)] == [("1", ("a",)), ("3", ("c",))]
    assert bad_rows.counts == {str(path): 1}
    with pytest.raises(InputError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:4: ")
    assert re.search(problem, str(error.value))


def test_a_bad_line_of_plain_text_is_skipped_and_counted(tmp_path: Path):
    path, bad_rows = write(tmp_path / "a.txt", "line one\n\nline \udcff two\nline three\n"), BadRows()
    assert [sentence.id for sentence in read(path, bad_rows, labels="ignored")] == ["1", "3"]
    assert bad_rows.counts == {str(path): 1}


def test_files_without_a_sentence_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"\ba: "):
        read(write(tmp_path / "a", "\n\n"))
    with pytest.raises(InputError, match=r"\ba: "):
        read(write(tmp_path / "a", "a O\n"), BadRows(), word_column=4)
    with pytest.raises(InputError, match=r"\bb: "):
        read(tmp_path / "b")


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("O I-A I-A O", [("A", 1, 3)]),
        ("B-A I-A B-A", [("A", 0, 2), ("A", 2, 3)]),
        ("I-A I-B I-B", [("A", 0, 1), ("B", 1, 3)]),
        ("B-A I-B O I-A", [("A", 0, 1), ("B", 1, 2), ("A", 3, 4)]),
        ("S-A E-A I-A", [("A", 0, 1), ("A", 1, 2), ("A", 2, 3)]),
        ("B-A I-A E-A S-A", [("A", 0, 3), ("A", 3, 4)]),
        ("B-A-B I-A-B", [("A-B", 0, 2)]),
        ("", []),
    ],
)
def test_spans(tags: str, spans: list):
    assert entity_spans(tags.split()) == spans


def conlleval(gold: list[list[str]], predicted: list[list[str]]) -> tuple[Counter, Counter, Counter]:
    """Entities right, guessed and correct by type, counted word by word as the Perl script does."""
    correct: Counter = Counter()
    right: Counter = Counter()
    guessed: Counter = Counter()
    in_correct, kept_type = False, ""
    words = [pair for tags in zip(gold, predicted, strict=True) for pair in [*zip(*tags, strict=True), ("O", "O")]]
    before = [("O", ""), ("O", "")]

    def split(tag: str) -> tuple[str, str]:
        return ("O", "") if tag == "O" else (tag.split("-", 1)[0], tag.split("-", 1)[1])

    def ends(last: tuple[str, str], now: tuple[str, str]) -> bool:
        pairs = {"BB", "BO", "IB", "IO", "EE", "EI", "EO", "EB", "SS", "SB", "SE", "SI", "SO", "BS", "IS", "ES"}
        return last[0] + now[0] in pairs or (last[0] != "O" and last[1] != now[1])

    def starts(last: tuple[str, str], now: tuple[str, str]) -> bool:
        pairs = {"BB", "IB", "OB", "OI", "EE", "EI", "OE", "EB", "SB", "SE", "SI", "OS", "BS", "IS", "ES", "SS"}
        return last[0] + now[0] in pairs or (now[0] != "O" and last[1] != now[1])

    for tags in words:
        now = [split(tag) for tag in tags]
        ended = [ends(*pair) for pair in zip(before, now, strict=True)]
        started = [starts(*pair) for pair in zip(before, now, strict=True)]
        if in_correct:
            if all(ended) and before[0][1] == before[1][1]:
                in_correct = False
                correct[kept_type] += 1
            elif ended[0] != ended[1] or now[0][1] != now[1][1]:
                in_correct = False
        if all(started) and now[0][1] == now[1][1]:
            in_correct, kept_type = True, now[0][1]
        right[now[0][1]] += started[0]
        guessed[now[1][1]] += started[1]
        before = now
    return +right, +guessed, +correct


@pytest.mark.parametrize("prefixes", ["I", "BI", "BIES"])
def test_scores_are_conllevals(prefixes: str):
    rng = random.Random(prefixes)
    for _ in range(300):
        gold = [random_tags(rng, prefixes) for _ in range(rng.randrange(1, 6))]
        predicted = [[tag if rng.random() < 0.6 else random_tags(rng, prefixes)[0] for tag in tags] for tags in gold]
        right, guessed, correct = conlleval(gold, predicted)
        overall, by_type = entity_scores(gold, predicted)
        assert by_type == {kind: EntityScore(right[kind], guessed[kind], correct[kind]) for kind in right | guessed}
        assert overall == EntityScore(right.total(), guessed.total(), correct.total())


@pytest.mark.parametrize("prefixes", ["I", "BI", "BIES"])
def test_scores_are_seqevals(prefixes: str):
    seqeval = pytest.importorskip("seqeval.metrics")
    rng = random.Random(prefixes)
    for _ in range(100):
        gold = [random_tags(rng, prefixes) for _ in range(rng.randrange(1, 6))]
        predicted = [[tag if rng.random() < 0.6 else random_tags(rng, prefixes)[0] for tag in tags] for tags in gold]
        overall, by_type = entity_scores(gold, predicted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = seqeval.classification_report(gold, predicted, output_dict=True, zero_division=0)
        micro = report.pop("micro avg", {"precision": 0, "recall": 0, "f1-score": 0, "support": 0})
        for score, theirs in [(overall, micro), *((by_type[kind], report[kind]) for kind in by_type)]:
            assert (score.precision, score.recall, score.f1, score.gold) == pytest.approx(
                (theirs["precision"], theirs["recall"], theirs["f1-score"], theirs["support"])
            )
        assert set(by_type) == set(report) - {"macro avg", "weighted avg"}


def test_scores_by_hand():
    overall, by_type = entity_scores([["B-A", "I-A", "O", "B-B"]], [["B-A", "O", "B-A", "B-B"]])
    assert (overall.precision, overall.recall, overall.f1) == (1 / 3, 1 / 2, 2 / 5)
    assert by_type == {"A": EntityScore(1, 2, 0), "B": EntityScore(1, 1, 1)}
    assert (by_type["A"].precision, by_type["A"].recall, by_type["A"].f1) == (0.0, 0.0, 0.0)
    nothing, none = entity_scores([["O"]], [["O"]])
    assert (nothing.precision, nothing.recall, nothing.f1, none) == (0.0, 0.0, 0.0, {})
    with pytest.raises(ValueError, match=r"\b2\b.*\b1\b"):
        entity_scores([["O", "O"]], [["O"]])


def test_bio_has_the_same_entities():
    rng = random.Random(0)
    for _ in range(500):
        tags = random_tags(rng, "BIES")
        converted = to_bio(tags)
        assert entity_spans(converted) == entity_spans(tags)
        assert to_bio(converted) == converted


def test_bio_by_hand():
    bio = ["B-A", "I-A", "B-A", "O", "B-B", "I-B", "I-B", "B-A"]
    assert to_bio(["I-A", "I-A", "B-A", "O", "I-B", "I-B", "I-B", "I-A"]) == bio  # IOB1
    assert to_bio(["B-A", "E-A", "S-A", "O", "B-B", "I-B", "E-B", "S-A"]) == bio  # BIOES


def test_tag_names():
    sentences = [TaggedSentence(("a", "b"), ("B-PER", "O"), 0, "1"), TaggedSentence(("c",), ("B-LOC",), 0, "2")]
    assert tag_names(sentences) == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert tag_names([TaggedSentence(("a",), None, 0, "1")]) == ("O",)


def test_predictions_as_conlleval_reads_them(tmp_path: Path):
    sentences = [TaggedSentence(("a", "b"), ("B-A", "O"), 0, "1"), TaggedSentence(("c",), ("O",), 0, "2")]
    write_conll(epath.Path(tmp_path / "out"), sentences, [["B-A", "I-A"], ["O"]])
    assert (tmp_path / "out").read_text() == "a B-A B-A\nb O I-A\n\nc O O\n\n"
    assert [sentence.tags for sentence in read(tmp_path / "out")] == [("B-A", "I-A"), ("O",)]
    write_conll(epath.Path(tmp_path / "out"), [TaggedSentence(("a b",), None, 0, "1")], [["O"]])
    assert (tmp_path / "out").read_text() == "a b\tO\n\n"


def test_real_files(data_dir: Path):
    counts = {"train": (3_394, 1_975), "dev": (1_009, 836), "test": (1_287, 1_079)}
    for split, (sentences, entities) in counts.items():
        tags = [sentence.tags or () for sentence in read(data_dir / "wnut17" / f"{split}.conll")]
        overall, by_type = entity_scores(tags, tags)
        assert (len(tags), overall.gold, overall.f1) == (sentences, entities, 1.0)
        assert list(by_type) == ["corporation", "creative-work", "group", "location", "person", "product"]
