"""Languages that are written without spaces, from raw text to pieces."""

import itertools
import unicodedata

import numpy as np
import pytest
from support.devices import one_device  # noqa: F401

from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.report import inspect_dataset
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.vocabulary_options import VocabularyOptions
from bert_jax.text.vocabulary_training import train_vocabulary

PARTS = {  # who, does what, where; each combination is a sentence
    "th": (["ฉัน", "แม่", "เพื่อน", "เด็ก"], ["กินข้าว", "อ่านหนังสือ", "ดูหนัง"], ["ที่บ้าน", "ในสวน", "ที่โรงเรียน", "ในเมือง"]),
    "km": (["ខ្ញុំ", "ម្តាយ", "មិត្តភក្តិ", "ក្មេង"], ["ញ៉ាំបាយ", "អានសៀវភៅ", "មើលកុន"], ["នៅផ្ទះ", "ក្នុងសួន", "នៅសាលារៀន"]),
    "lo": (["ຂ້ອຍ", "ແມ່", "ໝູ່", "ເດັກ"], ["ກິນເຂົ້າ", "ອ່ານປຶ້ມ", "ເບິ່ງໜັງ"], ["ຢູ່ເຮືອນ", "ໃນສວນ", "ຢູ່ໂຮງຮຽນ"]),
    "my": (["ကျွန်တော်", "အမေ", "သူငယ်ချင်း", "ကလေး"], ["ထမင်းစား", "စာအုပ်ဖတ်", "ရုပ်ရှင်ကြည့်"], ["အိမ်မှာ", "ဥယျာဉ်မှာ", "ကျောင်းမှာ"]),
}
ORDER = {"my": (0, 2, 1)}  # the verb comes last; other sentences end with the place
END = {"km": "។", "my": "သည်။"}
WITH_MARKS = {"km", "my"}


def corpus(language: str) -> list[list[str]]:
    """Returns documents of four sentences: every combination of who, what and where, in a fixed order."""
    order = ORDER.get(language, (0, 1, 2))
    made = ["".join(parts[place] for place in order) for parts in itertools.product(*PARTS[language])]
    made = [made[number * 7 % len(made)] + END.get(language, "") for number in range(len(made))]
    return [made[start : start + 4] for start in range(0, len(made), 4)]


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def write_corpus(folder, language: str) -> list[str]:
    """Writes `text.txt`, one sentence a line, or documents of one line where marks end sentences."""
    documents = corpus(language)
    join = "".join if language in WITH_MARKS else "\n".join
    (folder / "text.txt").write_text("\n\n".join(join(lines) for lines in documents) + "\n")
    return [line for lines in documents for line in lines]


def prepare(folder, vocabulary, language: str) -> PreparedDataset:
    split = ["--language", language] if language in WITH_MARKS else ["--sentences", "lines"]
    assert run(
        "prepare", "--input", folder / "text.txt", "--vocab", vocabulary, "--output", folder / "data", "--workers", 1,
        "--seq_len", 32, "--dupe_factor", 4, "--eval_fraction", 0.2, *split,
    ) == 0  # fmt: skip
    return PreparedDataset(str(folder / "data"))


@pytest.mark.parametrize("language", ["th", "km", "lo", "my"])
def test_pieces_of_sentences_without_spaces(language, tmp_path):
    """BPE, since a unigram model of so little text has hardly a piece of two characters."""
    lines = write_corpus(tmp_path, language)
    vocabulary = tmp_path / "bpe.json"
    kind = ["--kind", "bpe", "--size", 80]
    assert run("vocab", "--input", tmp_path / "text.txt", "--output", vocabulary, *kind) == 0
    dataset = prepare(tmp_path, vocabulary, language)
    report = inspect_dataset(str(tmp_path / "data"))
    assert report["unk_rate"] == 0
    assert sum(report[split]["sentences"] for split in ("train", "eval")) == len(lines)
    tokenizer = dataset.tokenizer
    for line, ids in zip(lines, tokenizer.encode_batch(lines), strict=True):
        assert 3 <= len(ids) < 0.6 * len(line)  # neither whole sentences nor single characters
        assert tokenizer.decode(ids) == unicodedata.normalize("NFKC", line)
        assert not tokenizer.continues_word(np.array([ids])).any()  # each piece is masked on its own


@pytest.mark.parametrize("text", ["日本語の文です。それは良い。", "中文没有空格。", "ﬁ日ſ"])
def test_characters_in_bytes_are_words_of_their_own(text: str):
    """A vocabulary of English spells them in bytes."""
    tokenizer = train_vocabulary(["The owl sat on the ship.\n" * 50], VocabularyOptions(kind="byte_bpe", size=300))
    continues, spelled = continuation(tokenizer, text), f" {text}".encode()  # the first word has a space before it
    begins = [place for place, byte in enumerate(spelled) if 0xE3 <= byte <= 0xE9]
    assert len(continues) == len(spelled)
    assert not continues[begins].any()
    assert all(continues[place + part] for place in begins for part in (1, 2))
    assert continuation(tokenizer, "жизнь").tolist() == [False] + [True] * 10


def continuation(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return tokenizer.continues_word(np.array(tokenizer.encode_batch([text])))[0]
