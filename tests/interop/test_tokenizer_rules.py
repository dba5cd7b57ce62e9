"""An imported tokenizer gives the ids of its source: on long words, on a final sigma, and after a round trip."""

import json
import pickle
from pathlib import Path

import pytest
from etils import epath
from support import sources
from tokenizers import Tokenizer

from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.preparation.pipeline import PrepareOptions, prepare
from bert_jax.errors import InputError
from bert_jax.interop import huggingface
from bert_jax.interop.importing import import_checkpoint
from bert_jax.interop.source_tokenizers.huggingface_tokenizer import read_tokenizer
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.wordpiece import CONTINUATION, TokenizerRules, WordPieceTokenizer
from bert_jax.training.checkpoints import Checkpoint

CHARACTERS = [*"aeoxé.,'-ασςοδυεύ", "中", "\ue000", "\U0002b820", "Σ", "Ο", "A"]
WORDS = [
    *(letter * count for letter in ("a", "é", "Ax") for count in range(99, 202)),
    *("e\u0301" * count for count in (50, 99, 100, 101, 200, 201)),
    "ΟΔΥΣΣΕΥΣ", "ΟΔΥΣΣΕΎΣ.", "ΣΑΣ'Α ΑΣ", "σας Σ ΟΔΟΣ, ΟΔΟΣ-ΟΔΟΣ", "a\ue000b", "中\U0002b820中", "Ax x. a,e",
]  # fmt: skip


@pytest.fixture(scope="module")
def pieces() -> list[str]:
    """Every character a piece, at the start of a word and after it."""
    return [*SPECIAL_TOKENS, *CHARACTERS, *(CONTINUATION + character for character in CHARACTERS)]


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def imported(request, pieces, tmp_path_factory) -> tuple[Path, Checkpoint]:
    folder = sources.write_source(tmp_path_factory.mktemp("rules") / "hf", pieces, heads=("mlm_head",))
    sources.write_tokenizer(folder, pieces, lowercase=request.param)
    return folder, import_checkpoint(str(folder), str(folder.with_name("imported")))


def ids_of(folder: Path, texts: list[str]) -> list[list[int]]:
    """The ids that the `tokenizers` library gives from a folder's tokenizer.json."""
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=False)]


def test_the_ids_of_the_source(imported):
    folder, checkpoint = imported
    expected = ids_of(folder, WORDS)
    assert checkpoint.tokenizer.encode_batch(WORDS) == expected
    assert [ids for ids, _ in checkpoint.tokenizer.encode_batch_with_offsets(WORDS)] == expected
    assert pickle.loads(pickle.dumps(checkpoint.tokenizer)).encode_batch(WORDS) == expected
    unknown = [ids == [checkpoint.tokenizer.unk_id] for ids in expected[:103]]
    assert unknown == [count > 100 for count in range(99, 202)]


def test_export_writes_the_rules_back(imported, tmp_path):
    folder, checkpoint = imported
    huggingface.export(checkpoint, str(tmp_path / "again"))
    assert ids_of(tmp_path / "again", WORDS) == ids_of(folder, WORDS)
    back = import_checkpoint(str(tmp_path / "again"), str(tmp_path / "back"))
    assert back.tokenizer.to_json() == checkpoint.tokenizer.to_json()


def test_transformers_gives_the_same_ids(imported, pieces, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")
    folder, checkpoint = imported
    huggingface.export(checkpoint, str(tmp_path / "again"))
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    vocabulary = folder.with_name("vocabulary alone")
    vocabulary.mkdir()
    (vocabulary / "vocab.txt").write_text("\n".join(pieces) + "\n")
    lowercase = checkpoint.tokenizer.lowercase
    (vocabulary / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase}))
    source = transformers.BertTokenizer(str(vocabulary / "vocab.txt"), do_lower_case=lowercase)
    ours = read_tokenizer(epath.Path(vocabulary))
    for text in WORDS:
        expected = source(text)["input_ids"]
        assert ours.encode_with_special_tokens(text)[0] == expected, ascii(text)
        assert exported(text)["input_ids"] == expected, ascii(text)


def test_a_limit_of_its_own(imported, tmp_path):
    folder, _ = imported
    described = json.loads((folder / "tokenizer.json").read_text())
    limits = {60: 60, None: 100}
    for limit, expected in limits.items():
        described["model"]["max_input_chars_per_word"] = limit
        if limit is None:
            del described["model"]["max_input_chars_per_word"]
        (tmp_path / "tokenizer.json").write_text(json.dumps(described))
        rules = read_tokenizer(epath.Path(tmp_path)).rules
        assert rules == TokenizerRules(expected, "library")
    for limit in (0, -1, "100", True, 1.5):
        described["model"]["max_input_chars_per_word"] = limit
        (tmp_path / "tokenizer.json").write_text(json.dumps(described))
        with pytest.raises(InputError, match=r"tokenizer\.json: model\.max_input_chars_per_word="):
            read_tokenizer(epath.Path(tmp_path))


def test_tokenizers_without_rules_load_as_before(pieces):
    tokenizer = WordPieceTokenizer(pieces, lowercase=True)
    assert set(tokenizer.to_json()) == {"kind", "lowercase", "vocab"}
    old = WordPieceTokenizer.from_json({"kind": "wordpiece", "lowercase": True, "vocab": pieces})
    assert old.rules == TokenizerRules(200, "reference")
    assert len(old.encode_batch(["a" * 200])[0]) == 200
    assert [old.id_to_token(i) for i in old.encode_batch(["ΟΣ"])[0]] == ["ο", "##ς"]
    library = WordPieceTokenizer(pieces, lowercase=True, rules=TokenizerRules(100, "library"))
    assert library.sha256 == old.sha256  # ids mean the same
    assert library.to_json() == {**old.to_json(), "max_word_characters": 100, "text_rules": "library"}
    for key, value in (("max_word_characters", 0), ("max_word_characters", "9"), ("text_rules", "other")):
        with pytest.raises(InputError, match=key):
            WordPieceTokenizer.from_json({**old.to_json(), key: value})


def test_a_dataset_keeps_the_rules(pieces, tmp_path):
    text = "\n\n".join(f"{'a' * 150} ΟΔΟΣ {letter}" for letter in "aeox" * 8)
    (tmp_path / "text.txt").write_text(text)
    hashes = []
    for rules in (TokenizerRules(), TokenizerRules(100, "library")):
        tokenizer = WordPieceTokenizer(pieces, lowercase=True, rules=rules)
        output = str(tmp_path / rules.text)
        scratch = str(tmp_path / "scratch")
        options = PrepareOptions(seq_len=512, sentences="lines")
        prepare([str(tmp_path / "text.txt")], tokenizer, output, options, scratch=scratch, allow_unk=1.0)
        dataset = PreparedDataset(output)
        assert dataset.tokenizer.rules == rules
        assert bool(dataset.token_counts()[tokenizer.unk_id]) == (rules.text == "library")
        hashes.append(dataset.info.hash)
    assert len(set(hashes)) == 2
    described = json.loads((tmp_path / "reference" / "dataset.json").read_text())["tokenizer"]
    assert set(described) == {"kind", "lowercase", "vocab_size", "sha256"}
