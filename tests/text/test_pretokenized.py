"""Text that was segmented into words or morphemes beforehand: `--pretokenized`, from the vocabulary to an export."""

import numpy as np
import pytest
from etils import epath
from support import sources
from support.devices import one_device  # noqa: F401

import bert_jax
from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.model import BertConfig
from bert_jax.model.bert import HEADS
from bert_jax.text.tokenizer import read_tokenizer
from bert_jax.training.checkpoints import save_parameters

# As MeCab, mecab-ko and a Chinese segmenter write it. BERT's own rules split "2,000", "AI-기반" and Chinese words, and
# drop the zero-width non-joiner of "می‌روم".
DOCUMENTS = {
    "ja": ["私 は 昨日 学校 に 行っ た 。", "友だち が 駅 で 待っ て い た 。", "本 は 2,000 円 だっ た 。"],
    "ko": ["나 는 어제 학교 에 갔 다 .", "AI-기반 로봇 이 2,000 개 있 다 .", "친구 가 역 에서 기다리 ㄴ다 ."],
    "zh": ["今天 天气 很 好 。", "我们 去 公园 散步 。", "这 本 书 卖 2,000 元 。"],
    "fa": ["من به مدرسه می‌روم .", "کتاب 2,000 تومان بود .", "او در خانه است ."],
}
LINES = [line for lines in DOCUMENTS.values() for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A vocabulary that has every word of the text as a piece, and an encoder with random parameters."""
    folder = tmp_path_factory.mktemp("pretokenized")
    documents = ["\n".join(lines * 3) for lines in DOCUMENTS.values()]
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n")
    arguments = ["vocab", "--input", folder / "text.txt", "--output", folder / "tokenizer.json", "--size", 400]
    assert run(*arguments, "--pretokenized", "--cased", "--character_coverage", 1) == 0
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    config = BertConfig(vocab_size=tokenizer.vocab_size, **sources.SIZES)
    parameters = sources.random_parameters(config, HEADS)
    save_parameters(epath.Path(folder / "checkpoint"), parameters, bert_config=config, tokenizer=tokenizer, heads=HEADS)
    return folder


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def words_of(tokenizer, ids) -> list[str]:
    """Returns the words that token ids [n] spell: a piece without `##` begins one."""
    return tokenizer.decode(ids).split()


def test_each_word_is_one_of_the_texts(folder):
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    for line, ids in zip(LINES, tokenizer.encode_batch(LINES), strict=True):
        assert words_of(tokenizer, ids) == line.split()
        starts = ~tokenizer.continues_word(np.array([ids]))[0]
        assert starts.sum() == len(line.split())
    assert tokenizer.is_pretokenized


@pytest.mark.parametrize("options", [["--sentences", "lines"], [], ["--language", "ja"], ["--language", "ko"]])
def test_a_dataset_has_the_words_of_the_text(options, folder, tmp_path):
    """The splitter of sentences neither drops a space nor changes a word; two paragraphs have several sentences."""
    paragraphs = [" ".join(lines) if "--sentences" not in options else "\n".join(lines) for lines in DOCUMENTS.values()]
    (tmp_path / "text.txt").write_text("\n\n".join(paragraphs) + "\n")
    assert run(
        "prepare", "--input", tmp_path / "text.txt", "--vocab", folder / "tokenizer.json",
        "--output", tmp_path / "data",
        "--pairs", "none", "--workers", 1, "--seq_len", 64, "--eval_fraction", 0, "--short_seq_prob", 0, *options,
    ) == 0  # fmt: skip
    dataset = PreparedDataset(str(tmp_path / "data"))
    assert dataset.tokenizer.is_pretokenized
    assert dataset.info.splits["train"].sentences == len(LINES)
    expected = np.bincount(
        np.concatenate(dataset.tokenizer.encode_batch(LINES)), minlength=dataset.tokenizer.vocab_size
    )
    np.testing.assert_array_equal(dataset.token_counts(), expected)


def test_an_export_has_the_same_ids_and_is_imported_again(folder, tmp_path):
    checkpoint = bert_jax.load(str(folder / "checkpoint"))
    assert run("export", "--checkpoint", folder / "checkpoint", "--output", tmp_path / "hf") == 0
    assert run("import", "--source", tmp_path / "hf", "--output", tmp_path / "back") == 0
    back = bert_jax.load(str(tmp_path / "back")).tokenizer
    assert back.to_json() == checkpoint.tokenizer.to_json()
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    for text in [*LINES, "本 は [MASK] 円 だっ た 。"]:
        ids, types = checkpoint.tokenizer.encode_with_special_tokens(text)
        encoded = theirs(text)
        assert (encoded["input_ids"], encoded["token_type_ids"]) == (ids, types), text
