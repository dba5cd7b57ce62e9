"""Readers of bert_jax that a fuzz campaign calls, each with valid files as seeds."""

import functools
import gzip
import io
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import sentencepiece
from etils import epath
from pyarrow import parquet
from random_model import write_random_model

from bert_jax.config import load_config
from bert_jax.data import records
from bert_jax.data.corpora import corpus
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.options import CorpusOptions, PrepareOptions
from bert_jax.data.preparation.pipeline import prepare
from bert_jax.errors import InputError
from bert_jax.finetuning.task import BadRows
from bert_jax.finetuning.tasks.choice import ChoiceTask
from bert_jax.finetuning.tasks.ner import NerTask, entity_scores
from bert_jax.finetuning.tasks.squad_files import read_questions
from bert_jax.finetuning.tasks.text import GlueTask, TextTask
from bert_jax.interop.importing import open_source, open_tokenizer
from bert_jax.interop.weights import open_weights
from bert_jax.model import BertConfig
from bert_jax.text.conversion import convert_vocabulary
from bert_jax.text.wordpiece import wordpiece_tokenizer
from bert_jax.tracking.metrics import read_metrics
from bert_jax.tracking.report import write_report
from bert_jax.training.checks import check_config

VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123)), *(f"##{c}" for c in "aeiourst"))
TEXTS = ("A film that I liked.", "Not so good, é.", "naïve\u2028 text 12")
SHARD = "train-00000-of-00001.array_record"


@dataclass(frozen=True)
class Target:
    """A reader of files.

    Attributes:
      name: the file's name, whose extension chooses the format.
      seeds: valid files.
      read: reads the file at a path. InputError and BertJaxError are refusals.
      prepare: writes what lies beside the file, once.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    read: Callable[[Path], object]
    prepare: Callable[[Path], None] = lambda folder: None


# --- Seeds ------------------------------------------------------------------------------------------------------------


def _encoded(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


def _parquet() -> list[bytes]:
    found = []
    for compression in ("snappy", "none"):
        sink = pa.BufferOutputStream()
        parquet.write_table(pa.table({"text": list(TEXTS) * 4, "id": list(range(12))}), sink, compression=compression)
        found.append(sink.getvalue().to_pybytes())
    return found


@functools.cache
def _sentencepiece() -> list[bytes]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"{a} {b} {c}" for a in VOCABULARY[5:] for b in "xyz" for c in TEXTS]),
        model_writer=model, vocab_size=44, model_type="unigram", minloglevel=2,
        pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, pad_piece="[PAD]", unk_piece="[UNK]",
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
    )  # fmt: skip
    return [model.getvalue()]


def _squad_json() -> list[bytes]:
    answer = {"text": "film", "answer_start": 2}
    question = {"id": "q1", "question": "What is it?", "answers": [answer], "is_impossible": False}
    article = {"title": "t", "paragraphs": [{"context": TEXTS[0], "qas": [question]}]}
    return [json.dumps({"version": "v2.0", "data": [article, article]}).encode()]


@functools.cache
def _model() -> dict[str, bytes]:
    """Returns the files of a small model, as `bert-jax export` writes them."""
    config = BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder), config, wordpiece_tokenizer(VOCABULARY, True))
        return _files(Path(folder, "huggingface"))


@functools.cache
def _dataset() -> dict[str, bytes]:
    """Returns the files of a small dataset."""
    lines = (f"{a} {b} is a line of text.\n{b} {a} another one." for a in TEXTS for b in "abcdefgh")
    with tempfile.TemporaryDirectory() as folder:
        text, output = Path(folder, "text.txt"), Path(folder, "data")
        text.write_text("\n".join(lines))
        options = PrepareOptions(seq_len=16, allow_unk=1.0)
        prepare([str(text)], wordpiece_tokenizer(VOCABULARY, True), str(output), options)
        return _files(output)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _records() -> list[bytes]:
    headers = records.make_headers(np.arange(1), np.array([5]), np.array([5]), np.zeros(1, np.uint8))
    return [headers.tobytes() + np.arange(5, 15, dtype=np.uint16).tobytes()]


_JSON_LINES = "".join(
    json.dumps({"text": text, "label": number % 2, "id": number}) + "\n" for number, text in enumerate(TEXTS * 2)
)
_CSV = "text,label\n" + "".join(f'"{text}",{number % 2}\n' for number, text in enumerate(TEXTS * 2))
_TSV = "text\tlabel\n" + "".join(f"{text}\t{number % 2}\n" for number, text in enumerate(TEXTS * 2))
_CONLL = "-DOCSTART- O\n\nAda B-PER\nLovelace I-PER\nsaw O\nRome S-LOC\n\nthe O\nEU B-ORG\n"
_MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + "".join(
    f"1\t{n}\t{n + 1}\t{TEXTS[0]}\t{TEXTS[1]}\n" for n in range(4)
)
_SWAG = (
    ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
    + "".join(f'{n},v{n},{n},a b,a,b,gold,one,"two, 2",three,four,{n % 4}\n' for n in range(4))
)  # fmt: skip
_METRICS = "".join(
    json.dumps({"step": 10 * step} | row) + "\n"
    for step in (1, 2)
    for row in (
        {"mlm_loss": 5.0, "nsp_accuracy": 0.7, "learning_rate": 1e-4, "tokens_per_second": 100.0, "time": 3.5},
        {"split": "eval", "mlm_loss": 4.5, "unigram_loss": 7.0, "dev/accuracy": 0.5},
    )
)
_OVERRIDES = (
    "total_steps=1000\noptimizer.learning_rate=1e-4\nmesh.data=-1", "phases=({'steps': 5},)\nseed=3",
    "data.packing=True\nmodel.hidden_size=64\nobjective.mask_rate=0.3",
)  # fmt: skip


# --- Readers ----------------------------------------------------------------------------------------------------------


def _documents(path: Path) -> None:
    for piece in corpus.plan([str(path)], CorpusOptions()):
        for _ in corpus.read(piece, CorpusOptions()):
            pass


def _vocabulary(path: Path) -> None:
    convert_vocabulary(str(path)).encode_batch(list(TEXTS))


def _overrides(path: Path) -> None:
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    config = load_config("bert_tiny", [(key, value) for key, _, value in (line.partition("=") for line in lines)])
    check_config(config, config.total_steps)


def _rows(path: Path) -> None:
    TextTask().read_training(str(path), BadRows())


def _conll(path: Path) -> None:
    tags = [sentence.tags or () for sentence in NerTask().read(str(path), BadRows())]
    entity_scores(tags, tags)


def _weights(path: Path) -> None:
    for weight in open_weights(epath.Path(path)).values():
        weight.read()


def _instances(path: Path) -> None:
    PreparedDataset(str(path.parent)).instances("train", np.arange(1))


def _record(path: Path) -> None:
    try:
        records.decode([path.read_bytes()], len(VOCABULARY))
    except ValueError as error:  # its refusal; the reader of a shard adds the shard's name
        raise InputError(str(error)) from error


def _model_file(name: str, read: Callable[[str], object]) -> Target:
    """Returns the reader of a model's folder, one of whose files is damaged."""
    return Target(name, lambda: [_model()[name]], lambda path: read(str(path.parent)), lambda at: _write(_model(), at))


def _dataset_file(name: str, read: Callable[[Path], object] = _instances) -> Target:
    """Returns the reader of a dataset, one of whose files is damaged."""
    return Target(name, lambda: [_dataset()[name]], read, lambda folder: _write(_dataset(), folder))


TARGETS = {
    "corpus: text": Target("corpus.txt", lambda: _encoded("\n".join(TEXTS), "\n\n".join(TEXTS * 3)), _documents),
    "corpus: JSON lines": Target("corpus.jsonl", lambda: _encoded(_JSON_LINES), _documents),
    "corpus: CSV": Target("corpus.csv", lambda: _encoded(_CSV), _documents),
    "corpus: TSV": Target("corpus.tsv", lambda: _encoded(_TSV), _documents),
    "corpus: gzip": Target("corpus.txt.gz", lambda: [gzip.compress(text) for text in _encoded(*TEXTS)], _documents),
    "corpus: Parquet": Target("corpus.parquet", _parquet, _documents),
    "vocabulary: WordPiece": Target("vocab.txt", lambda: _encoded("\n".join(VOCABULARY) + "\n"), _vocabulary),
    "vocabulary: SentencePiece": Target("pieces.model", _sentencepiece, _vocabulary),
    "tokenizer.json": _model_file("tokenizer.json", open_tokenizer),
    "config overrides": Target("overrides.txt", lambda: _encoded(*_OVERRIDES), _overrides),
    "task: TSV": Target("task.tsv", lambda: _encoded(_CSV.replace(",", "\t")), _rows),
    "task: CSV": Target("task.csv", lambda: _encoded(_CSV), _rows),
    "task: JSON lines": Target("task.jsonl", lambda: _encoded(_JSON_LINES), _rows),
    "task: GLUE": Target(
        "dev.tsv", lambda: _encoded(_MRPC), lambda path: GlueTask.of("mrpc").read(str(path), BadRows(), split="dev")
    ),
    "task: CoNLL": Target("task.conll", lambda: _encoded(_CONLL), _conll),
    "task: SQuAD": Target("squad.json", _squad_json, lambda path: read_questions(path, BadRows(), training=True)),
    "task: SWAG": Target(
        "swag.csv", lambda: _encoded(_SWAG), lambda path: ChoiceTask().read(str(path), BadRows())
    ),
    "model: config.json": _model_file("config.json", open_source),
    "model: safetensors": Target("model.safetensors", lambda: [_model()["model.safetensors"]], _weights),
    "dataset.json": _dataset_file("dataset.json"),
    "dataset: shard": _dataset_file(SHARD),
    "dataset: lengths": _dataset_file(
        "train-lengths.npy", lambda path: PreparedDataset(str(path.parent)).lengths("train")
    ),
    "dataset: record of an instance": Target("record", _records, _record),
    "metrics.jsonl": Target(
        "metrics.jsonl", lambda: _encoded(_METRICS), lambda path: read_metrics(epath.Path(path.parent))
    ),
    "report": Target(
        "metrics.jsonl", lambda: _encoded(_METRICS),
        lambda path: write_report([str(path.parent)], str(path.with_suffix(".html"))),
    ),
}  # fmt: skip
