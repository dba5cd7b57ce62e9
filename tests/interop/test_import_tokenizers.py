"""The tokenizers of folders of `transformers`: `tokenizer.json` with all its rules, or what is converted to one."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from support import helpers, sources

from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.interop import huggingface
from bert_jax.interop.importing import import_checkpoint, open_tokenizer
from bert_jax.text.tokenizer import read_tokenizer
from bert_jax.training.checkpoints import open_checkpoint


def edit_tokenizer(folder: Path, part: str, **values: object) -> None:
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    sources.edit_json(path, **{part: {**described[part], **values}})


def add_token(folder: Path, piece: str) -> None:
    """Makes a piece of the vocabulary a token that is matched before words are split."""
    content = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": content["model"]["vocab"][piece], "content": piece, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_case_is_what_the_folder_says_or_what_is_given(folder: Path):
    (folder / "tokenizer.json").unlink()
    for number, (stated, given, lowercase) in enumerate(
        [(True, None, True), (False, None, False), (None, True, True), (None, False, False), (True, False, False)]
    ):
        sources.edit_json(folder / "tokenizer_config.json", do_lower_case=stated, tokenizer_class="BertTokenizer")
        checkpoint = import_checkpoint(str(folder), str(folder.with_name(str(number))), lowercase=given)
        assert checkpoint.tokenizer.lowercase is lowercase


@pytest.mark.parametrize("given", [True, False])
def test_a_given_case_decides_about_accents_too(given: bool, folder: Path):
    (folder / "tokenizer.json").unlink()
    settings = {"do_lower_case": not given, "strip_accents": not given, "tokenizer_class": "BertTokenizer"}
    sources.edit_json(folder / "tokenizer_config.json", **settings)
    tokenizer = import_checkpoint(str(folder), str(folder.with_name("given")), lowercase=given).tokenizer
    assert tokenizer.content["normalizer"]["strip_accents"] in (None, given)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [True, False])
@pytest.mark.parametrize("where", ["tokenizer_config.json", "tokenizer.json"])
def test_accents_are_what_the_folder_says(
    where: str, strip_accents: bool, lowercase: bool, folder: Path, vocabulary: list[str]
):
    accented = list(dict.fromkeys([*vocabulary, "é", "É", "e", "E"]))
    sources.write_tokenizer(folder, accented, lowercase=lowercase)
    if where == "tokenizer.json":
        edit_tokenizer(folder, "normalizer", strip_accents=strip_accents)
    else:
        (folder / "tokenizer.json").unlink()
        sources.edit_json(folder / where, strip_accents=strip_accents)
    tokenizer = open_tokenizer(str(folder))
    (tokens,) = tokenizer.encode_batch(["É"])
    letter = "É".lower() if lowercase else "É"
    expected = {"é": "e", "É": "E"}[letter] if strip_accents else letter
    assert [tokenizer.id_to_token(token) for token in tokens] == [expected]


@pytest.mark.parametrize(
    "change",
    [
        lambda f: edit_tokenizer(f, "normalizer", clean_text=False, handle_chinese_chars=False),
        lambda f: sources.edit_json(f / "tokenizer.json", normalizer={"type": "NFC"}),
        lambda f: sources.edit_json(f / "tokenizer.json", pre_tokenizer={"type": "Whitespace"}),
        lambda f: edit_tokenizer(f, "model", max_input_chars_per_word=9),
        lambda f: add_token(f, "ship"),
    ],
    ids=["options", "normalizer", "pre_tokenizer", "limit", "added"],
)  # fmt: skip
def test_all_rules_of_a_tokenizer_are_followed(change, folder: Path):
    (folder / "vocab.txt").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    change(folder)
    text = "The SHIP sees\u0000 shipwrecks, 中国 café's harbour_harbour"
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = library.encode(text, add_special_tokens=False).ids
    assert open_tokenizer(str(folder)).encode_batch([text]) == [expected]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: sources.edit_json(f / "tokenizer_config.json", do_lower_case=False), "do_lower_case"),
        (lambda f: edit_tokenizer(f, "model", vocab={"[PAD]": 0}), "[UNK]"),
        (lambda f: edit_tokenizer(f, "model", vocab={"[PAD]": "0"}), "tokenizer.json: "),
        (lambda f: edit_tokenizer(f, "model", vocab=None), "tokenizer.json: "),
        (lambda f: edit_tokenizer(f, "normalizer", lowercase="yes"), "tokenizer.json: "),
        (lambda f: [(f / name).unlink() for name in ("vocab.txt", "tokenizer.json")], "vocab.txt"),
    ],
)
def test_tokenizers_that_cannot_be_read(spoil, message: str, folder: Path):
    spoil(folder)
    sources.refused(folder, message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_basic_tokenize": False}, "do_basic_tokenize=false"),
        ({"never_split": ["ship"]}, "never_split="),
        ({"tokenize_chinese_chars": False}, "tokenize_chinese_chars=false"),
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "tokenizer_class="),
    ],
)
def test_settings_that_would_change_the_ids_of_a_vocab_txt(settings: dict, message: str, folder: Path):
    (folder / "tokenizer.json").unlink()
    sources.edit_json(folder / "tokenizer_config.json", **settings)
    sources.refused(folder, "tokenizer_config.json: ", message)


@pytest.mark.parametrize("kind", ["tokenizer.json", "vocab.txt"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"additional_special_tokens": ["ship"]}, "'ship'"),
        ({"extra_special_tokens": {"ship_token": "ship"}}, "'ship'"),
        ({"added_tokens_decoder": {"4": {"content": "[MASK]"}, "9": {"content": "ship"}}}, "'ship'"),
        ({"strip_accents": False}, "strip_accents=false contradicts the tokenizer; correct one, or omit --cased"),
        ({"tokenize_chinese_chars": False}, "tokenize_chinese_chars=false"),
        ({"mask_token": "ship"}, "'ship'"),
        ({"additional_special_tokens": 5}, "settings are invalid"),
        ({"added_tokens_decoder": {"4": {"id": 4}}}, "settings are invalid"),
        ({}, "'ship'"),
    ],
    ids=str,
)
def test_settings_that_transformers_obeys_are_followed_or_refused(
    kind: str, settings: dict, message: str, folder: Path
):
    (folder / {"tokenizer.json": "vocab.txt", "vocab.txt": "tokenizer.json"}[kind]).unlink()
    sources.edit_json(folder / "tokenizer_config.json", **settings)
    if not settings:
        (folder / "added_tokens.json").write_text(json.dumps({"ship": 9}))
    followed = {"tokenizer.json": "mask_token", "vocab.txt": "strip_accents"}[kind]
    if followed not in settings:
        sources.refused(folder, message)
        return
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")
    text = "The ship sees a ships café."
    expected = transformers.AutoTokenizer.from_pretrained(str(folder))(text)["input_ids"]
    tokenizer = open_tokenizer(str(folder))
    assert tokenizer.encode_with_special_tokens(text)[0] == expected
    assert (tokenizer.special_tokens[4], tokenizer.strip_accents) == (
        settings.get("mask_token", "[MASK]"),
        kind != "vocab.txt",
    )


# --- For `prepare --vocab` ---------------------------------------------------------------------------------------


def prepare(corpus: Path, vocabulary: Path, output: Path, *more: object) -> int:
    words = ["prepare", "--input", corpus, "--vocab", vocabulary, "--output", output, "--workers", 1, *more]
    return cli.main([str(word) for word in words])


@pytest.mark.parametrize("kind", ["transformers", "imported", "workdir", "export"])
def test_prepare_takes_the_tokenizer_of_a_folder(kind: str, folder: Path, corpus_file: Path, tmp_path: Path):
    (folder / "vocab.txt").unlink()
    place = folder
    if kind != "transformers":
        place = tmp_path / "imported"
        assert cli.main(["import", "--source", str(folder), "--output", str(place)]) == 0
    if kind == "workdir":
        shutil.copytree(place, tmp_path / "workdir" / "checkpoints" / "7")
        place = tmp_path / "workdir"
        (place / "config.json").write_text("{}")
    if kind == "export":
        huggingface.export(open_checkpoint(str(place)), str(tmp_path / "export"))
        place = tmp_path / "export"
    assert prepare(corpus_file, place, tmp_path / "data", "--sentences", "lines") == 0
    dataset = PreparedDataset(str(tmp_path / "data"))
    imported = read_tokenizer(folder / "tokenizer.json")
    assert dataset.tokenizer.sha256 == imported.sha256
    assert dataset.tokenizer.to_json() == imported.to_json()


@pytest.mark.parametrize("kind", ["nothing", "empty", "file"])
def test_what_is_no_tokenizer_is_refused_in_one_line(
    kind: str, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tmp_path / "empty").mkdir()
    place = {"nothing": tmp_path / "nothing", "empty": tmp_path / "empty", "file": corpus_file}[kind]
    assert prepare(corpus_file, place, tmp_path / "data") == 2
    (line,) = helpers.error_lines(capsys.readouterr().err)
    assert str(place) in line
    assert not (tmp_path / "data").exists()
