import logging

import pytest

from bert_jax.data.preparation.pipeline import PrepareOptions
from bert_jax.errors import InputError
from bert_jax.text import sentences
from bert_jax.text.sentences import warn_of_language


@pytest.mark.parametrize("given", ["korean", "DE", "en_US", "", "e", "français"])
def test_what_is_no_code_is_refused_with_those_that_have_rules(given):
    with pytest.raises(InputError, match=rf"language='{given}': .*\bde el en es\b"):
        PrepareOptions(language=given)


@pytest.mark.parametrize("code", ["en", "de", "ko", "zh", "zh-hant", "pt-br", "sv", "gsw", "xx", "cbk-zam"])
def test_codes_are_taken(code):
    assert PrepareOptions(language=code).language == code
    assert sentences.split("One. Two.", code)


@pytest.mark.parametrize(
    ("code", "words"), [("de", []), ("sv", ["rules"]), ("az-latn", ["rules"]), ("th", ["--sentences lines"])]
)
def test_warnings(code, words, caplog):
    warn_of_language(code)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(words)
    assert all(word in message for word, message in zip(words, caplog.messages, strict=True))
