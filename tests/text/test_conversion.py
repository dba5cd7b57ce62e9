"""`vocab --from`: a `vocab.txt` or a SentencePiece model becomes a `tokenizer.json`."""

import io
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from support import helpers
from text.test_tokenizer import OWN_TEXT

from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.errors import InputError
from bert_jax.text.conversion import convert_vocabulary
from bert_jax.text.tokenizer import SPECIAL_TOKENS, read_tokenizer

TEXT = "\n\n".join(f"The Ship {letter} sees the OLD Sailor .\nA wave hears the Ghost ." for letter in "abcdefgh") + "\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "corpus.txt").write_text(TEXT)
    return tmp_path


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


def prepare(folder, vocabulary: str, output: str, *more: object) -> int:
    arguments = ["prepare", "--input", folder / "corpus.txt", "--vocab", folder / vocabulary, "--workers", 1]
    return run(*arguments, "--output", folder / output, "--sentences", "lines", *more)


def write_vocab_txt(folder, *more: str) -> None:
    words = sorted({word.lower() for word in TEXT.split()})
    letters = [f"{mark}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz" for mark in ("", "##")]
    pieces = dict.fromkeys([*SPECIAL_TOKENS, *words, *letters, *more])
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")


def test_a_dataset_has_the_rules_of_its_vocabulary(folder):
    assert run("vocab", "--input", folder / "corpus.txt", "--output", folder / "t.json", "--size", 90) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.txt", "t.json"]
    assert prepare(folder, "t.json", "data") == 0
    dataset = PreparedDataset(str(folder / "data"))
    assert dataset.info.tokenizer["lowercase"]
    assert dataset.token_counts()[dataset.tokenizer.unk_id] == 0
    for vocabulary in ("data", "data/tokenizer.json"):  # a vocabulary that is taken out of a dataset
        output = f"again-{vocabulary.replace('/', '-')}"
        assert prepare(folder, vocabulary, output) == 0
        assert PreparedDataset(str(folder / output)).info.hash == dataset.info.hash


@pytest.mark.parametrize("case", ["capital", "continuation", "none"])
def test_a_vocab_txt_is_cased_if_a_piece_has_a_capital(case, folder):
    more = {
        "capital": ["T"], "continuation": ["##Ж"], "none": ["[A]", "Ω\u0301", "第"],
    }[case]  # fmt: skip
    write_vocab_txt(folder, *more)
    assert run("vocab", "--from", folder / "vocab.txt", "--output", folder / "t.json") == 0
    tokenizer = read_tokenizer(folder / "t.json")
    assert tokenizer.lowercase is (case == "none")
    assert list(tokenizer.vocab) == (folder / "vocab.txt").read_text().split("\n")[:-1]
    assert prepare(folder, "t.json", "data", "--allow_unk", 1) == 0


def test_options_of_a_vocab_txt(folder):
    write_vocab_txt(folder, "é")
    for options, rules in (
        ([], (True, True)), (["--cased"], (False, False)), (["--keep_accents"], (True, False)),
    ):  # fmt: skip
        (folder / "t.json").unlink(missing_ok=True)
        assert run("vocab", "--from", folder / "vocab.txt", "--output", folder / "t.json", *options) == 0
        tokenizer = read_tokenizer(folder / "t.json")
        assert (tokenizer.lowercase, tokenizer.strip_accents) == rules


@pytest.mark.parametrize(("name", "lowercase"), [("uncased", True), ("cased", False), ("multilingual-cased", False)])
def test_released_vocabularies(name, lowercase, data_dir):
    path = str(data_dir / f"vocab/bert-base-{name}-vocab.txt")
    assert convert_vocabulary(path).lowercase is lowercase
    assert convert_vocabulary(path, cased=True).lowercase is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vocab", "--from", "vocab.txt", "--input", "corpus.txt", "--output", "t.json"], "--from=vocab.txt"),
        (["vocab", "--output", "t.json"], "--input"),
        (["vocab", "--from", "vocab.txt", "--output", "t.json", "--size", "90"], "--size=90"),
        (["vocab", "--from", "vocab.txt", "--output", "t.json", "--kind", "bpe"], "--kind=bpe"),
        (["vocab", "--from", "vocab.txt", "--output", "t.json", "--errors", "replace"], "--errors=replace"),
        (["vocab", "--from", "other.json", "--output", "t.json"], "--from=other.json"),
        (["vocab", "--from", "nothing.txt", "--output", "t.json"], "nothing.txt"),
        (["vocab", "--from", "corpus.txt", "--output", "t.json"], "corpus.txt"),
        (["vocab", "--from", "x.model", "--cased", "--output", "t.json"], "--cased"),
        (["vocab", "--input", "corpus.txt", "--output", "vocab.txt"], "tokenizer.json"),
        (["vocab", "--input", "corpus.txt", "--output", "new/"], "tokenizer.json"),
        (["vocab", "--input", "corpus.txt", "--output", "/proc/t.json"], "/proc"),
        (["prepare", "--input", "corpus.txt", "--vocab", "vocab.txt", "--output", "data"], "vocab --from vocab.txt"),
        (["prepare", "--input", "corpus.txt", "--vocab", "x.model", "--output", "data"], "vocab --from x.model"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_refused_in_one_line(words, message, folder, monkeypatch, capsys):
    write_vocab_txt(folder)
    monkeypatch.chdir(folder)
    assert run(*words) == 2
    (line,) = helpers.error_lines(capsys.readouterr().err)
    assert message in line
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.txt", "vocab.txt"]


def test_a_vocabulary_in_a_store(store, folder):
    write_vocab_txt(folder)
    store.put("vocab.txt", (folder / "vocab.txt").read_bytes())
    assert run("vocab", "--from", "gs://bucket/vocab.txt", "--output", "gs://bucket/tokenizer.json") == 0
    assert store.names() == ["tokenizer.json", "vocab.txt"]
    assert read_tokenizer("gs://bucket/tokenizer.json").sha256 == convert_vocabulary(str(folder / "vocab.txt")).sha256


def foreign(tmp_path, **options: object) -> str:
    """Writes a model as other programs train them, with SentencePiece's own normalization."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*OWN_TEXT * 5, *helpers.make_corpus(40).split("\n")]),
        model_writer=file,
        **{
            "vocab_size": 500, "hard_vocab_limit": False, "minloglevel": 2, "pad_id": 0, "unk_id": 1,
            "bos_id": -1, "eos_id": -1, "control_symbols": ["[CLS]", "[SEP]", "[MASK]"], "num_threads": 2, **options,
        },
    )  # fmt: skip
    (tmp_path / "foreign.model").write_bytes(file.getvalue())
    return str(tmp_path / "foreign.model")


@pytest.mark.parametrize("name", ["nmt_nfkc_cf", "nmt_nfkc", "identity"])
def test_a_sentencepiece_model_keeps_its_own_normalization(name, tmp_path):
    path = foreign(tmp_path, normalization_rule_name=name)
    tokenizer = convert_vocabulary(path)
    assert (tokenizer.kind, tokenizer.lowercase) == ("unigram", name == "nmt_nfkc_cf")
    assert tokenizer.special_tokens == ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
    library = sentencepiece.SentencePieceProcessor(model_file=path)
    texts = [*OWN_TEXT, "㍿ ﬁ e\u0301 x", "a  b  c "]
    for text, expected in zip(texts, library.encode(texts), strict=True):
        assert tokenizer.encode_batch([text]) == [expected], text
    for text, (ids, offsets) in zip(texts, tokenizer.encode_batch_with_offsets(texts), strict=True):
        assert len(ids) == len(offsets), text
        assert (np.diff(offsets, axis=0) >= 0).all(), text


def test_user_defined_symbols_of_a_sentencepiece_model(tmp_path):
    path = foreign(tmp_path, user_defined_symbols=["<ent>"])
    tokenizer = convert_vocabulary(path)
    (ids,) = tokenizer.encode_batch(["see <ent>"])
    assert ids == sentencepiece.SentencePieceProcessor(model_file=path).encode("see <ent>")
    assert tokenizer.token_to_id("<ent>") in ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"control_symbols": ["[CLS]", "[SEP]"]}, r"lacks special tokens: \[MASK\]"),
        ({"pad_id": -1, "unk_id": 0}, r"lacks special tokens: \[PAD\]"),
        ({"byte_fallback": True, "vocab_size": 700}, "byte_fallback"),
        ({"treat_whitespace_as_suffix": True}, "other ids"),
        ({"model_type": "bpe"}, "other ids"),
        ({"add_dummy_prefix": False}, "other ids"),
        ({"remove_extra_whitespaces": False}, "other ids"),
    ],
)
def test_sentencepiece_models_that_are_not_supported(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        convert_vocabulary(foreign(tmp_path, **options))


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"hello", b"\x1a\x00", b"\n\x05\n\x03abc"[:-1], b"\n\x05\n\x03\xff\xff\xff"]
)
def test_bytes_that_are_not_a_model(data, tmp_path):
    (tmp_path / "odd.model").write_bytes(data)
    with pytest.raises(InputError, match=r"odd\.model.*SentencePiece"):
        convert_vocabulary(str(tmp_path / "odd.model"))


def test_a_model_with_a_damaged_table_of_normalization_is_refused(tmp_path):
    path = Path(foreign(tmp_path))
    assert b"\0ffi\0" in path.read_bytes()  # of U+FB03, in the table
    path.write_bytes(path.read_bytes().replace(b"\0ffi\0", b"\0\xff\xff\xff\0"))
    with pytest.raises(InputError, match=r"foreign\.model.*SentencePiece"):
        convert_vocabulary(str(path))


def test_no_damage_of_the_table_ends_in_a_panic(tmp_path):
    path = Path(foreign(tmp_path))
    data, refused = path.read_bytes(), []
    table = data.find(b"\0ffi\0") - 19_000  # offsets into the normalized strings, some bytes before these
    for position in range(table, table + 3_000, 300):
        path.write_bytes(data[:position] + bytes([data[position] ^ 2]) + data[position + 1 :])
        try:
            convert_vocabulary(str(path))
        except InputError as error:
            refused.append(type(error.__cause__).__name__)
    assert "PanicException" in refused
