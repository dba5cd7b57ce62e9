import logging

import pytest

from bert_jax.data.corpora import corpus
from bert_jax.text import sentences


def test_abbreviations_do_not_end_a_sentence_and_line_ends_do():
    text = "Dr. Smith went to Washington. He came back!\nA heading without a full stop\n\n  Was it raining? Yes.  "
    assert sentences.split(text) == [
        "Dr. Smith went to Washington.",
        "He came back!",
        "A heading without a full stop",
        "Was it raining?",
        "Yes.",
    ]


def test_unclosed_quotation_ends_with_its_line():
    assert sentences.split('She said "go.\nHe went. He came.') == ['She said "go.', "He went.", "He came."]


def test_the_language_decides_the_abbreviations():
    text = "Er kam z.B. Am Montag."
    assert sentences.split(text, "de") == ["Er kam z.B. Am Montag."]
    assert sentences.split("第一句。第二句。", "zh") == ["第一句。", "第二句。"]


@pytest.mark.parametrize("space", ["\u00a0", "\u2003", "\u2028", "\u3000"])
def test_wide_spaces_after_an_initial(space, caplog):
    """sentencex panics on these spaces."""
    with caplog.at_level(logging.WARNING):
        assert sentences.split(f"B. J.{space}Smith wrote. It{space}sold.") == ["B. J. Smith wrote.", "It sold."]
    assert not caplog.records


def test_a_panic_costs_one_line(monkeypatch, caplog):
    class PanicException(BaseException):
        pass

    def segment(language: str, line: str) -> list[str]:
        if "bad" in line:
            raise PanicException("byte index 8 is not a char boundary")
        return line.split("|")

    monkeypatch.setattr(sentences.sentencex, "segment", segment)
    with caplog.at_level(logging.WARNING):
        assert sentences.split("a|b\nbad|line\nc|d") == ["a", "b", "bad|line", "c", "d"]
    assert len(caplog.records) == 1
    monkeypatch.setattr(sentences.sentencex, "segment", lambda language, line: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sentences.split("a")


def test_lines_are_taken_as_they_are():
    assert sentences.lines(" One. Two.\n\nThree\u2028four\r\n") == ["One. Two.", "Three\u2028four"]


def test_nothing_of_real_text_is_lost(data_dir):
    options = corpus.CorpusOptions()
    piece = corpus.plan([str(data_dir / "corpus/wikiextractor")], options)[0]
    for document in corpus.read(piece, options):
        split = sentences.split(document)
        assert "".join("".join(split).split()) == "".join(document.split())
        assert all(sentence == sentence.strip() != "" for sentence in split)
