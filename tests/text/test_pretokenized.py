"""Text that was segmented into words or morphemes beforehand: `--pretokenized`, from the vocabulary to an export."""

import json

import numpy as np
import pytest
from etils import epath
from support import sources
from support.devices import one_device  # noqa: F401

import bert_jax
from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.finetuning.rows import BadRows
from bert_jax.finetuning.tasks.ner import NerTask
from bert_jax.finetuning.tasks.ner_windows import encode_windows
from bert_jax.finetuning.tasks.squad_files import read_questions
from bert_jax.finetuning.tasks.squad_spans import build_windows
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


def test_a_mask_is_a_word(folder, capsys):
    assert run("fill-mask", "--checkpoint", folder / "checkpoint", "--json", "本 は [MASK] 円 だっ た 。") == 0
    (found,) = json.loads(capsys.readouterr().out)["texts"]
    for filling in found["masks"][0]:
        piece = filling["token"]
        if not piece.startswith("##"):
            assert filling["text"] == f"本 は {piece} 円 だっ た 。"


def test_features_have_the_words(folder, tmp_path):
    (tmp_path / "lines.txt").write_text("AI-기반 로봇 이 있 다 .\n")
    arguments = ["features", "--checkpoint", folder / "checkpoint", "--input", tmp_path / "lines.txt"]
    assert run(*arguments, "--output", tmp_path / "out.jsonl", "--layers", "-1") == 0
    (row,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [token["token"] for token in row["features"]] == ["[CLS]", "AI-기반", "로봇", "이", "있", "다", ".", "[SEP]"]


def test_offsets_of_answers_are_those_of_the_text(folder, tmp_path):
    context, answer = " ".join(DOCUMENTS["ko"]), "2,000 개"
    entry = {"id": "1", "question": "로봇 이", "answers": [{"text": answer, "answer_start": context.index(answer)}]}
    content = {"version": "1.1", "data": [{"title": "", "paragraphs": [{"context": context, "qas": [entry]}]}]}
    (tmp_path / "train.json").write_text(json.dumps(content))
    questions = read_questions(str(tmp_path / "train.json"), BadRows(), training=True)
    tokenizer = bert_jax.load(str(folder / "checkpoint")).tokenizer
    (window,) = build_windows(questions, tokenizer, max_seq_len=64, doc_stride=16, max_query_length=8)
    first, last = (place - window.sequence.first_length for place in (window.start, window.end))
    assert context[window.offsets[first, 0] : window.offsets[last, 1]] == answer
    assert [context[begin:end] for begin, end in window.offsets] == context.split()


def test_named_entities_are_tagged_by_word(folder, tmp_path):
    (tmp_path / "text.txt").write_text("AI-기반 로봇 이 2,000 개 있 다 .\n")
    tokenizer = bert_jax.load(str(folder / "checkpoint")).tokenizer
    (window,) = encode_windows(tokenizer, NerTask().read(str(tmp_path / "text.txt"), BadRows(), labels="ignored"), 32)
    pieces = [tokenizer.id_to_token(window.sequence.input_ids[position]) for _, _, position in window.words]
    assert pieces == ["AI-기반", "로봇", "이", "2,000", "개", "있", "다", "."]


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
