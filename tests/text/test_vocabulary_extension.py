"""Extension of a vocabulary with the words of a domain: `vocab --extend`."""

import json
import random
from pathlib import Path

import pytest
from support import helpers

from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.text.tokenizer import Tokenizer, read_tokenizer
from bert_jax.text.vocabulary_extension import extend_vocabulary, find_extension
from bert_jax.text.wordpiece import wordpiece_tokenizer

WORDS = {"shipwreck": 30, "moonlit": 40, "foxes": 12, "owlet": 3, "stormy": 20, "1492": 90}
PIECES = ["##wreck", "##lit", "[unused0]", "[unused1]"]


def text(seed: int = 0) -> str:
    words = [word for word, count in WORDS.items() for _ in range(count)] + ["the"] * 500
    random.Random(seed).shuffle(words)
    return "\n\n".join(" ".join(words[start : start + 20]) + " ." for start in range(0, len(words), 20)) + "\n"


@pytest.fixture
def folder(tmp_path: Path, vocabulary: list[str]) -> Path:
    pieces = [*vocabulary, *PIECES]
    helpers.write_tokenizer(tmp_path / "tokenizer.json", pieces)
    (tmp_path / "corpus.txt").write_text(text())
    return tmp_path


def extend(folder: Path, output: str = "new.json", *more: object, extend: str = "tokenizer.json") -> int:
    arguments = ["vocab", "--extend", folder / extend, "--output", folder / output, *more]
    if "--input" not in more:
        arguments += ["--input", folder / "corpus.txt"]
    return cli.main([str(word) for word in arguments])


def pieces(folder: Path, name: str) -> list[str]:
    return list(read_tokenizer(folder / name).vocab)


def test_words_that_save_the_most_tokens_are_appended(folder: Path, capsys: pytest.CaptureFixture):
    assert extend(folder, "new.json", "--json") == 0
    old, new = pieces(folder, "tokenizer.json"), pieces(folder, "new.json")
    assert new[: len(old)] == old
    # count x (pieces - 1): foxes 12 x 2 (fox ##e ##s), moonlit 40 x 1, shipwreck 30 x 1, stormy 20 x 1
    assert new[len(old) :] == ["moonlit", "shipwreck", "foxes", "stormy"]
    printed = json.loads(capsys.readouterr().out)
    assert printed["tokens_before"] - printed["tokens_after"] == 40 + 30 + 12 * 2 + 20
    assert (printed["pieces"], printed["added"], printed["replaced_unused"]) == (len(new), 4, 0)


def test_number_and_count_limit_the_words(folder: Path):
    assert extend(folder, "new.json", "--add", 2) == 0
    assert pieces(folder, "new.json")[-2:] == ["moonlit", "shipwreck"]
    assert extend(folder, "rare.json", "--min_count", 3) == 0
    assert "owlet" in pieces(folder, "rare.json")
    assert not {"1492", "owlet"} & {*pieces(folder, "new.json")}


def test_unused_pieces_are_replaced_on_request(folder: Path):
    assert extend(folder, "new.json", "--replace_unused") == 0
    old, new = pieces(folder, "tokenizer.json"), pieces(folder, "new.json")
    assert [(a, b) for a, b in zip(old, new, strict=False) if a != b] == [
        ("[unused0]", "moonlit"), ("[unused1]", "shipwreck"),
    ]  # fmt: skip
    assert new[len(old) :] == ["foxes", "stormy"]


def test_the_order_of_documents_does_not_matter(folder: Path):
    (folder / "shuffled.txt").write_text(text(seed=1))
    assert extend(folder, "a.json") == extend(folder, "b.json", "--input", folder / "shuffled.txt") == 0
    assert (folder / "a.json").read_bytes() == (folder / "b.json").read_bytes()


def test_a_dataset_of_the_extended_vocabulary_has_the_new_words(folder: Path):
    assert extend(folder) == 0
    arguments = ["prepare", "--input", folder / "corpus.txt", "--vocab", folder / "new.json", "--workers", 1]
    assert cli.main([str(word) for word in [*arguments, "--output", folder / "data", "--sentences", "lines"]]) == 0
    dataset = PreparedDataset(str(folder / "data"))
    counts = dataset.token_counts()
    assert counts[dataset.tokenizer.token_to_id("moonlit")] > 0
    assert counts[dataset.tokenizer.token_to_id("##lit")] == 0


def test_the_rules_of_the_old_tokenizer_stay(folder: Path, vocabulary: list[str]):
    old = wordpiece_tokenizer([*vocabulary, *PIECES], True, text="library", max_word_characters=100)
    (folder / "hf").mkdir()
    old.save(folder / "hf")
    assert extend(folder, extend="hf") == 0
    content = read_tokenizer(folder / "new.json").content
    assert content["model"]["max_input_chars_per_word"] == 100
    for part in ("normalizer", "pre_tokenizer"):
        assert content[part] == old.content[part]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size", 100], ["--size=100", "--extend"]),
        (["--kind", "bpe"], ["--kind=bpe", "--extend"]),
        (["--add", 0], ["--add=0", "1"]),
        (["--min_count", 10_000], ["--min_count=10000"]),
        (["--cased"], ["--cased"]),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    options: list[object], words: list[str], folder: Path, vocabulary: list[str], capsys: pytest.CaptureFixture
):
    (folder / "old.json").write_bytes(wordpiece_tokenizer(vocabulary, lowercase=True).file_bytes())
    assert extend(folder, "new.json", *options, extend="old.json") == 2
    (line,) = helpers.error_lines(capsys.readouterr().err)
    assert all(word in line for word in words), line
    assert not (folder / "new.json").exists()


@pytest.mark.parametrize("option", [["--add", 5], ["--min_count", 5], ["--replace_unused"]])
def test_options_of_an_extension_need_one(option: list[object], folder: Path, capsys: pytest.CaptureFixture):
    arguments = ["vocab", "--input", folder / "corpus.txt", "--output", folder / "new.json", *option]
    assert cli.main([str(word) for word in arguments]) == 2
    (line,) = helpers.error_lines(capsys.readouterr().err)
    assert str(option[0]) in line
    assert "--extend" in line


def test_an_extension_is_known_by_its_pieces(vocabulary: list[str]):
    old = wordpiece_tokenizer([*vocabulary, *PIECES], lowercase=True)
    found = find_extension(old, extend_vocabulary(old, ["moonlit", "shipwreck", "Zq"], replace_unused=True))
    names = [[old.vocab[piece] for piece in split] for split in found.pieces]
    assert names == [["moon", "##lit"], ["ship", "##wreck"], ["[UNK]"]]
    assert found.ids == (old.token_to_id("[unused0]"), old.token_to_id("[unused1]"), old.vocab_size)
    assert find_extension(old, old).ids == ()
    swapped = wordpiece_tokenizer([*vocabulary[:-2], vocabulary[-1], vocabulary[-2], *PIECES, "new"], lowercase=True)
    assert find_extension(old, swapped) is None
    assert find_extension(old, wordpiece_tokenizer([*old.vocab, "new"], lowercase=False)) is None
    assert find_extension(old, wordpiece_tokenizer(vocabulary, lowercase=True)) is None
    (letters,) = find_extension(old, extend_vocabulary(old, ["##zed"])).pieces
    assert [old.vocab[piece] for piece in letters] == ["##z", "##e", "##d"]


def test_pretokenized_text_has_another_vocabulary(vocabulary: list[str]):
    def tokenizer(rules: str, *more: str) -> Tokenizer:
        return wordpiece_tokenizer([*vocabulary, *more], True, text=rules)

    assert tokenizer("reference").sha256 == tokenizer("library").sha256 != tokenizer("pretokenized").sha256
    assert find_extension(tokenizer("reference"), tokenizer("library", "moonlit"))
    assert find_extension(tokenizer("pretokenized"), tokenizer("pretokenized", "moonlit"))
    for more in ((), ("moonlit",)):
        assert find_extension(tokenizer("pretokenized"), tokenizer("reference", *more)) is None


def test_a_unigram_vocabulary_is_refused_in_one_line(folder: Path, capsys: pytest.CaptureFixture):
    arguments = ["vocab", "--input", folder / "corpus.txt", "--output", folder / "old.json", "--kind", "unigram"]
    assert cli.main([str(word) for word in [*arguments, "--size", 60]]) == 0
    capsys.readouterr()
    assert extend(folder, extend="old.json") == 2
    (line,) = helpers.error_lines(capsys.readouterr().err)
    assert str(folder / "old.json") in line
    assert "WordPiece" in line
