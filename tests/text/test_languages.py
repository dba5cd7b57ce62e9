import pytest

from bert_jax import cli
from bert_jax.data.preparation.pipeline import PrepareOptions
from bert_jax.errors import InputError
from bert_jax.text import sentences


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("korean", "ko"), ("Korean", "ko"), ("deutsch", "de"), ("german", "de"), ("DE", "de"), ("de-DE", "de"),
        ("en_US", "en"), ("English", "en"), ("français", "fr"), ("francais", "fr"), ("chinese", "zh"), ("jp", "ja"),
        ("cn", "zh"), ("portugese", "pt"), ("nynorsk", "nn"),
    ],
)  # fmt: skip
def test_unknown_code_is_refused_with_a_suggestion(given, meant):
    with pytest.raises(InputError, match=rf"--language='{given}': .*\b{meant} \("):
        PrepareOptions(language=given)


@pytest.mark.parametrize("given", ["xx", "", "klingonese", "e", "zz-top"])
def test_unknown_code_is_refused_with_the_known_codes(given):
    with pytest.raises(InputError, match=r"--language=.*\bde, el, en, es\b") as caught:
        PrepareOptions(language=given)
    assert "(" not in str(caught.value)


@pytest.mark.parametrize("code", ["en", "de", "ko", "zh", "zh-hant", "pt-br", "sv", "gsw", "kr"])
def test_codes_are_taken(code):
    assert PrepareOptions(language=code).language == code
    assert sentences.split("One. Two.", code)


def test_the_command_exits_with_2_before_anything_is_written(corpus_file, vocabulary_file, tmp_path, capsys):
    arguments = ["prepare", "--input", corpus_file, "--vocab", vocabulary_file, "--output", tmp_path / "data"]
    assert cli.main([*map(str, arguments), "--language", "deutsch"]) == 2
    assert "de (German)" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
