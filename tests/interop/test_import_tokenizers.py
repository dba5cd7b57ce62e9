"""Tests the tokenizers that import reads, and those it refuses, which would produce other ids than ours."""

import json
from pathlib import Path

import pytest
import tokenizers
from etils import epath
from support import sources

from bert_jax.errors import InputError
from bert_jax.interop.importing import import_checkpoint
from bert_jax.interop.source_tokenizers.huggingface_tokenizer import read_tokenizer
from bert_jax.text.wordpiece import TokenizerRules, WordPieceTokenizer


def edit_tokenizer(folder: Path, part: str, **values: object) -> None:
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    sources.edit_json(path, **{part: {**described[part], **values}})


def test_case_is_what_the_folder_says_or_what_is_given(folder: Path):
    (folder / "tokenizer.json").unlink()
    for number, (stated, given, lowercase) in enumerate(
        [(True, None, True), (False, None, False), (None, True, True), (None, False, False), (True, False, False)]
    ):
        sources.edit_json(folder / "tokenizer_config.json", do_lower_case=stated, tokenizer_class="BertTokenizer")
        checkpoint = import_checkpoint(str(folder), str(folder.with_name(str(number))), lowercase=given)
        assert checkpoint.tokenizer.lowercase is lowercase


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("only", ["tokenizer.json", "all"])
def test_both_files_that_say_the_case(lowercase: bool, only: str, folder: Path, vocabulary: list[str]):
    sources.write_tokenizer(folder, vocabulary, lowercase=lowercase)
    if only == "tokenizer.json":
        (folder / "tokenizer_config.json").unlink()
    assert import_checkpoint(str(folder), str(folder.with_name("output"))).tokenizer.lowercase is lowercase


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize(
    "rules",
    [
        TokenizerRules(),
        TokenizerRules(strip_accents=False),
        TokenizerRules(strip_accents=True),
        TokenizerRules(text="pretokenized"),
        TokenizerRules(text="pretokenized", strip_accents=False),
    ],
    ids=str,
)
def test_a_tokenizer_of_our_own(rules: TokenizerRules, lowercase: bool, folder: Path, vocabulary: list[str]):
    tokenizer = WordPieceTokenizer(vocabulary, lowercase, rules)
    tokenizer.save_huggingface(str(folder), model_max_length=64)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (folder / name).unlink()
    imported = import_checkpoint(str(folder), str(folder.with_name("output"))).tokenizer
    assert imported.to_json() == tokenizer.to_json()
    assert imported.sha256 == tokenizer.sha256


def test_a_tokenizer_without_the_type_of_its_model(folder: Path, vocabulary: list[str]):
    tokenizer = WordPieceTokenizer(vocabulary, lowercase=True)
    tokenizer.save_huggingface(str(folder), model_max_length=64)
    described = json.loads((folder / "tokenizer.json").read_text())
    del described["model"]["type"]  # as `tokenizers` wrote them before 0.9
    (folder / "tokenizer.json").write_text(json.dumps(described))
    assert tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == len(vocabulary)
    imported = import_checkpoint(str(folder), str(folder.with_name("output"))).tokenizer
    assert imported.sha256 == tokenizer.sha256


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [True, False])
@pytest.mark.parametrize("where", ["tokenizer_config.json", "tokenizer.json"])
def test_accents_are_what_the_folder_says(
    where: str, strip_accents: bool, lowercase: bool, folder: Path, vocabulary: list[str]
):
    accented = [*vocabulary, "é", "É", "e", "E"]
    sources.write_tokenizer(folder, list(dict.fromkeys(accented)), lowercase=lowercase)
    if where == "tokenizer.json":
        edit_tokenizer(folder, "normalizer", strip_accents=strip_accents)
    else:
        sources.edit_json(folder / where, strip_accents=strip_accents)
    sources.edit_json(folder / "config.json", vocab_size=len(dict.fromkeys(accented)))
    (tokens,) = read_tokenizer(epath.Path(folder)).encode_batch(["É"])
    letter = "É".lower() if lowercase else "É"
    expected = {"é": "e", "É": "E"}[letter] if strip_accents else letter
    assert [read_tokenizer(epath.Path(folder)).id_to_token(token) for token in tokens] == [expected]


def test_a_case_that_nobody_knows(folder: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    sources.refused(folder, "tokenizer_config.json", "--cased or --uncased")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: sources.edit_json(f / "tokenizer_config.json", do_lower_case=False), "do_lower_case"),
        (
            lambda f: (
                sources.edit_json(f / "tokenizer_config.json", strip_accents=False),
                edit_tokenizer(f, "normalizer", strip_accents=True),
            ),
            "contradictory strip_accents",
        ),
        (lambda f: sources.edit_json(f / "tokenizer_config.json", tokenize_chinese_chars=False), "tokenize_chinese"),
        (lambda f: edit_tokenizer(f, "normalizer", clean_text=False), "clean_text=False"),
        (lambda f: edit_tokenizer(f, "normalizer", handle_chinese_chars=False), "handle_chinese_chars=False"),
        (lambda f: edit_tokenizer(f, "normalizer", type="NFC"), "normalizer.type='NFC'"),
        (lambda f: sources.edit_json(f / "tokenizer.json", pre_tokenizer=None), "pre_tokenizer.type=None"),
        (lambda f: edit_tokenizer(f, "model", type="BPE"), "model.type='BPE'"),
        (lambda f: edit_tokenizer(f, "model", unk_token="<unk>"), "unk_token='<unk>'"),
        (lambda f: edit_tokenizer(f, "model", continuing_subword_prefix="@@"), "continuing_subword_prefix='@@'"),
        (lambda f: edit_tokenizer(f, "model", vocab={"[PAD]": 0, "a": 2}), "model.vocab"),
        (lambda f: sources.edit_json(f / "tokenizer.json", added_tokens=[{"id": 103, "content": "<x>"}]), "'<x>'"),
        (lambda f: edit_tokenizer(f, "model", vocab={"[PAD]": 0}), "'[UNK]'"),
        (lambda f: (f / "vocab.txt").write_text((f / "vocab.txt").read_text() + "more\n"), "vocab.txt"),
        (lambda f: [(f / name).unlink() for name in ("vocab.txt", "tokenizer.json")], "vocab.txt"),
        (lambda f: (f / "vocab.txt").write_text("[PAD]\n"), "[UNK]"),
        (lambda f: edit_tokenizer(f, "model", vocab={"[PAD]": 0, "a": True}), "model.vocab"),
        (lambda f: edit_tokenizer(f, "model", vocab={"[PAD]": "0"}), "model.vocab"),
        (lambda f: edit_tokenizer(f, "model", vocab=None), "model.vocab"),
        (lambda f: edit_tokenizer(f, "normalizer", lowercase="yes"), "tokenizer.json: lowercase='yes'"),
        (lambda f: edit_tokenizer(f, "normalizer", strip_accents=1), "tokenizer.json: strip_accents=1"),
        (lambda f: edit_tokenizer(f, "normalizer", clean_text=0), "tokenizer.json: clean_text=0"),
    ],
)
def test_tokenizers_that_are_not_berts(spoil, message: str, folder: Path):
    spoil(folder)
    sources.refused(folder, message)


@pytest.mark.parametrize("value", [["x"], "x", 5])
@pytest.mark.parametrize("part", ["model", "normalizer", "pre_tokenizer", "added_tokens"])
def test_parts_of_a_tokenizer_that_are_no_objects(part: str, value: object, folder: Path):
    sources.edit_json(folder / "tokenizer.json", **{part: value})
    sources.refused(folder, f"tokenizer.json: {part}")


@pytest.mark.parametrize("edited", ["vocab.txt", "tokenizer.json"])
def test_words_in_the_place_of_unused_pieces(edited: str, folder: Path, vocabulary: list[str]):
    """The edit of a vocabulary that continued pre-training usually makes, in one of the two files."""
    before = [f"[unused{number}]" if number in (7, 9) else piece for number, piece in enumerate(vocabulary)]
    sources.write_tokenizer(folder, vocabulary if edited == "tokenizer.json" else before)
    lines = before if edited == "tokenizer.json" else vocabulary
    (folder / "vocab.txt").write_text("\n".join(lines) + "\n")
    checkpoint = import_checkpoint(str(folder), str(folder.with_name("output")))
    assert checkpoint.tokenizer.vocab == tuple(vocabulary)


@pytest.mark.parametrize("token", ["[ENT]", "covid"])
def test_added_tokens_in_the_vocabulary(token: str, folder: Path, vocabulary: list[str]):
    """They are matched before words are split, so that the ids of a text would differ."""
    sources.write_tokenizer(folder, [*vocabulary[:-1], token])
    described = json.loads((folder / "tokenizer.json").read_text())
    added = [*described["added_tokens"], {"id": len(vocabulary) - 1, "content": token, "special": False}]
    sources.edit_json(folder / "tokenizer.json", added_tokens=added)
    sources.refused(folder, "tokenizer.json: added_tokens", repr(token))


def test_added_tokens_of_transformers_4(folder: Path):
    (folder / "tokenizer.json").unlink()
    (folder / "added_tokens.json").write_text(json.dumps({"[ENT]": 103}))
    sources.refused(folder, "added_tokens.json: '[ENT]'")
    (folder / "added_tokens.json").unlink()
    listed = {"4": {"content": "[MASK]"}, "103": {"content": "[ENT]"}}
    sources.edit_json(folder / "tokenizer_config.json", added_tokens_decoder=listed)
    sources.refused(folder, "tokenizer_config.json: added_tokens_decoder: '[ENT]'")


@pytest.mark.parametrize("token", [{"id": 3}, {"content": ["[SEP]"], "id": 3}, {"content": "[SEP]"}])
def test_added_tokens_that_are_none(token: dict, folder: Path):
    sources.edit_json(folder / "tokenizer.json", added_tokens=[token])
    sources.refused(folder, "tokenizer.json: ", "added_tokens")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_basic_tokenize": False}, "do_basic_tokenize=False"),
        ({"never_split": ["ship"]}, "never_split=['ship']"),
        ({"mask_token": "<mask>"}, "mask_token='<mask>'"),
        ({"mask_token": {"content": "<mask>", "lstrip": True}}, "mask_token='<mask>'"),
        ({"pad_token": 0}, "pad_token=0"),
        ({"do_lower_case": "no"}, "do_lower_case='no'"),
        ({"strip_accents": 1}, "strip_accents=1"),
    ],
)
@pytest.mark.parametrize("with_json", [True, False])
def test_settings_that_would_change_the_ids(settings: dict, message: str, with_json: bool, folder: Path):
    if not with_json:
        (folder / "tokenizer.json").unlink()
    sources.edit_json(folder / "tokenizer_config.json", **settings)
    sources.refused(folder, "tokenizer_config.json: ", message)


def test_special_tokens_that_are_berts(folder: Path, source: Path):
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        described = {"content": "[MASK]", "lstrip": False}
        sources.edit_json(folder / name, mask_token=described, cls_token="[CLS]", never_split=[])
    sources.assert_reads_as(folder, source)
    sources.edit_json(folder / "special_tokens_map.json", unk_token="<unk>")
    with pytest.raises(InputError, match=r"special_tokens_map\.json: unk_token='<unk>'.*\[UNK\]"):
        import_checkpoint(str(folder), str(folder.with_name("output")))


def test_a_tokenizer_of_its_own_class(folder: Path):
    (folder / "tokenizer.json").unlink()
    sources.edit_json(folder / "tokenizer_config.json", tokenizer_class="BertJapaneseTokenizer")
    sources.refused(folder, "tokenizer_class='BertJapaneseTokenizer'")
