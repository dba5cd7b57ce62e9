"""Readers of bert_jax that a fuzz campaign calls, each with valid files as seeds."""

import functools
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.errors import InputError

VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123)), *(f"##{c}" for c in "aeiourst"))
TEXTS = ("A film that I liked.", "Not so good, é.", "naïve\u2028 text 12")
MODEL = {
    "vocab_size": len(VOCABULARY), "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "hidden_act": "gelu", "max_position_embeddings": 16, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "model_type": "bert",
    "architectures": ["BertForPreTraining"],
}  # fmt: skip


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


def _documents(path: Path, **options: Any) -> None:
    from bert_jax.data.corpora.corpus import CorpusOptions, plan, read

    chosen = CorpusOptions(**options)
    for piece in plan([str(path)], chosen):
        for _ in read(piece, chosen):
            pass


def _encoded(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


def _parquet() -> list[bytes]:
    import pyarrow as pa
    from pyarrow import parquet

    found = []
    for compression in ("snappy", "none"):
        sink = pa.BufferOutputStream()
        parquet.write_table(pa.table({"text": list(TEXTS) * 4, "id": list(range(12))}), sink, compression=compression)
        found.append(sink.getvalue().to_pybytes())
    return found


@functools.cache
def _sentencepiece() -> list[bytes]:
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"{a} {b} {c}" for a in VOCABULARY[5:] for b in "xyz" for c in TEXTS]),
        model_writer=model, vocab_size=44, model_type="unigram", minloglevel=2,
        pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, pad_piece="[PAD]", unk_piece="[UNK]",
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
    )  # fmt: skip
    return [model.getvalue()]


def _vocabulary(path: Path) -> None:
    from bert_jax.text.conversion import convert_vocabulary

    tokenizer = convert_vocabulary(str(path))
    tokenizer.encode_batch(list(TEXTS))


def _overrides(path: Path) -> None:
    from bert_jax.config import load_config
    from bert_jax.training.checks import check_config

    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    config = load_config("bert_tiny", [(key, value) for key, _, value in (line.partition("=") for line in lines)])
    check_config(config, config.total_steps)


def _rows(path: Path) -> None:
    from bert_jax.finetuning.task import BadRows
    from bert_jax.finetuning.tasks.text import TextTask

    TextTask().read_training(str(path), BadRows())


def _glue(path: Path) -> None:
    from bert_jax.finetuning.task import BadRows
    from bert_jax.finetuning.tasks.text import GlueTask

    GlueTask.of("mrpc").read(str(path), BadRows(), split="dev")


def _conll(path: Path) -> None:
    from bert_jax.finetuning.task import BadRows
    from bert_jax.finetuning.tasks.ner import NerTask, entity_scores

    tags = [sentence.tags or () for sentence in NerTask().read(str(path), BadRows())]
    entity_scores(tags, tags)


def _squad(path: Path) -> None:
    from bert_jax.finetuning.task import BadRows
    from bert_jax.finetuning.tasks.squad_files import read_questions

    read_questions(path, BadRows(), training=True)


def _choices(path: Path) -> None:
    from bert_jax.finetuning.task import BadRows
    from bert_jax.finetuning.tasks.choice import ChoiceTask

    ChoiceTask().read(str(path), BadRows())


def _squad_json() -> list[bytes]:
    answer = {"text": "film", "answer_start": 2}
    question = {"id": "q1", "question": "What is it?", "answers": [answer], "is_impossible": False}
    article = {"title": "t", "paragraphs": [{"context": TEXTS[0], "qas": [question]}]}
    return [json.dumps({"version": "v2.0", "data": [article, article]}).encode()]


def _open_model(path: Path) -> None:
    from bert_jax.interop.importing import open_source

    open_source(str(path.parent))


def _read_weights(path: Path) -> None:
    from etils import epath

    from bert_jax.interop.weights import open_weights

    for weight in open_weights(epath.Path(path)).values():
        weight.read()


def _model_folder(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    (folder / "model.safetensors").write_bytes(_safetensors()[0])


@functools.cache
def _safetensors() -> list[bytes]:
    from safetensors.numpy import save

    rng = np.random.default_rng(0)
    hidden, between = MODEL["hidden_size"], MODEL["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (len(VOCABULARY), hidden),
        "bert.embeddings.position_embeddings.weight": (16, hidden),
        "bert.embeddings.token_type_embeddings.weight": (2, hidden),
        "cls.predictions.bias": (len(VOCABULARY),),
    }
    layer = "bert.encoder.layer.0."
    dense = {
        layer + "attention.self.query": (hidden, hidden), layer + "attention.self.key": (hidden, hidden),
        layer + "attention.self.value": (hidden, hidden), layer + "attention.output.dense": (hidden, hidden),
        layer + "intermediate.dense": (between, hidden), layer + "output.dense": (hidden, between),
        "bert.pooler.dense": (hidden, hidden), "cls.predictions.transform.dense": (hidden, hidden),
        "cls.seq_relationship": (2, hidden),
    }  # fmt: skip
    for name, shape in dense.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in ("bert.embeddings", layer + "attention.output", layer + "output", "cls.predictions.transform"):
        shapes |= {f"{name}.LayerNorm.{part}": (hidden,) for part in ("weight", "bias")}
    return [save({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}, {"format": "pt"})]


def _tokenizer_json() -> list[bytes]:
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({piece: number for number, piece in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return [tokenizer.to_str().encode()]


def _open_tokenizer(path: Path) -> None:
    from bert_jax.interop.importing import open_tokenizer

    open_tokenizer(str(path.parent))


@functools.cache
def _dataset() -> dict[str, bytes]:
    """Returns the files of a small dataset."""
    import tempfile

    from bert_jax.data.preparation.pipeline import PrepareOptions, prepare
    from bert_jax.text.wordpiece import wordpiece_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text(
            "\n".join(f"{a} {b} is a line of text.\n{b} {a} another one." for a in TEXTS for b in "abcdefgh")
        )
        output = Path(folder, "data")
        options = PrepareOptions(seq_len=16, allow_unk=1.0)
        prepare([str(text)], wordpiece_tokenizer(VOCABULARY, True), str(output), options)
        return {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}


def _write_dataset(folder: Path) -> None:
    for name, content in _dataset().items():
        (folder / name).write_bytes(content)


def _open_dataset(path: Path) -> None:
    from bert_jax.data.dataset import PreparedDataset

    dataset = PreparedDataset(str(path.parent))
    dataset.instances("train", np.arange(1))


def _read_lengths(path: Path) -> None:
    from bert_jax.data.dataset import PreparedDataset

    PreparedDataset(str(path.parent)).lengths("train")


def _record(path: Path) -> None:
    from bert_jax.data.records import decode

    try:
        decode([path.read_bytes()], len(VOCABULARY))
    except ValueError as error:  # its refusal; the reader of a shard adds the shard's name
        raise InputError(str(error)) from error


def _records() -> list[bytes]:
    from bert_jax.data.records import make_headers

    headers = make_headers(np.arange(1), np.array([5]), np.array([5]), np.zeros(1, np.uint8))
    return [headers.tobytes() + np.arange(5, 15, dtype=np.uint16).tobytes()]


def _metrics(path: Path) -> None:
    from etils import epath

    from bert_jax.tracking.metrics import read_metrics

    read_metrics(epath.Path(path.parent))


def _report(path: Path) -> None:
    from bert_jax.tracking.report import write_report

    write_report([str(path.parent)], str(path.with_suffix(".html")))


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

TARGETS = {
    "corpus: text": Target("corpus.txt", lambda: _encoded("\n".join(TEXTS), "\n\n".join(TEXTS * 3)), _documents),
    "corpus: JSON lines": Target("corpus.jsonl", lambda: _encoded(_JSON_LINES), _documents),
    "corpus: CSV": Target("corpus.csv", lambda: _encoded(_CSV), _documents),
    "corpus: TSV": Target("corpus.tsv", lambda: _encoded(_TSV), _documents),
    "corpus: gzip": Target("corpus.txt.gz", lambda: [gzip.compress(text) for text in _encoded(*TEXTS)], _documents),
    "corpus: Parquet": Target("corpus.parquet", _parquet, _documents),
    "vocabulary: WordPiece": Target("vocab.txt", lambda: _encoded("\n".join(VOCABULARY) + "\n"), _vocabulary),
    "vocabulary: SentencePiece": Target("pieces.model", _sentencepiece, _vocabulary),
    "tokenizer.json": Target("tokenizer.json", _tokenizer_json, _open_tokenizer, _model_folder),
    "config overrides": Target(
        "overrides.txt",
        lambda: _encoded(
            "total_steps=1000\noptimizer.learning_rate=1e-4\nmesh.data=-1", "phases=({'steps': 5},)\nseed=3",
            "data.packing=True\nmodel.hidden_size=64\nobjective.mask_rate=0.3",
        ),
        _overrides,
    ),
    "task: TSV": Target("task.tsv", lambda: _encoded(_CSV.replace(",", "\t")), _rows),
    "task: CSV": Target("task.csv", lambda: _encoded(_CSV), _rows),
    "task: JSON lines": Target("task.jsonl", lambda: _encoded(_JSON_LINES), _rows),
    "task: GLUE": Target("dev.tsv", lambda: _encoded(_MRPC), _glue),
    "task: CoNLL": Target("task.conll", lambda: _encoded(_CONLL), _conll),
    "task: SQuAD": Target("squad.json", _squad_json, _squad),
    "task: SWAG": Target("swag.csv", lambda: _encoded(_SWAG), _choices),
    "model: config.json": Target("config.json", lambda: [json.dumps(MODEL).encode()], _open_model, _model_folder),
    "model: safetensors": Target("model.safetensors", lambda: _safetensors(), _read_weights),
    "dataset.json": Target("dataset.json", lambda: [_dataset()["dataset.json"]], _open_dataset, _write_dataset),
    "dataset: shard": Target(
        "train-00000-of-00001.array_record", lambda: [_dataset()["train-00000-of-00001.array_record"]], _open_dataset,
        _write_dataset,
    ),
    "dataset: lengths": Target(
        "train-lengths.npy", lambda: [_dataset()["train-lengths.npy"]], _read_lengths, _write_dataset
    ),
    "dataset: record of an instance": Target("record", _records, _record),
    "metrics.jsonl": Target("metrics.jsonl", lambda: _encoded(_METRICS), _metrics),
    "report": Target("metrics.jsonl", lambda: _encoded(_METRICS), _report),
}  # fmt: skip
