"""The kinds of files that bert_jax writes, and a reader for each, which returns a digest of what it has read."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax.config import load_config
from bert_jax.data.dataset import PreparedDataset
from bert_jax.errors import InputError
from bert_jax.files import provenance
from bert_jax.finetuning.results import read_result
from bert_jax.interop import huggingface_reading
from bert_jax.model import BertConfig
from bert_jax.parallel.mesh import make_mesh
from bert_jax.text.vocabulary_record import open_vocabulary
from bert_jax.text.wordpiece import WordPieceTokenizer
from bert_jax.tracking.metrics import read_metrics
from bert_jax.tracking.report.reported_runs import read_reported
from bert_jax.training.checkpointing.checkpointer import Checkpointer
from bert_jax.training.checkpointing.checkpoints import newest_intact, open_checkpoint
from bert_jax.training.checkpointing.retention import MilestoneRecord
from bert_jax.training.pretrain import plan_state

STEPS = (10, 20)
CONFIG = load_config("bert_tiny", [])
MODEL = BertConfig(
    vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=32,
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
      folder: what is copied for each flip, below the inputs.
      files: patterns of the files in which bits are flipped, below `folder`.
      read: reads the folder; returns a digest of the result. It is given the flipped file as well.
      names: a part of the path that a message has to contain; "" for that of the flipped file.
      has_digest: whether bert_jax's format has a digest of the content; without one, silent flips are only counted.
    """

    folder: str
    files: tuple[str, ...]
    read: Callable[[Path, Path], str]
    names: str = ""
    has_digest: bool = True


def digest(value: Any) -> str:
    """Returns a digest of arrays and of what JSON can say."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda leaf: leaf is None):
        found.update(jax.tree_util.keystr(path).encode())
        if isinstance(leaf, np.ndarray | jax.Array):
            array = np.asarray(leaf)
            found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()[:16]


def _dataset(folder: Path, _: Path) -> str:
    dataset = PreparedDataset(str(folder))
    read: list[Any] = [dataset.info.hash, dataset.tokenizer.to_json(), dataset.token_counts()]
    for split in ("train", "eval"):
        instances = dataset.instances(split, np.arange(dataset.size(split)))
        read += [dataset.lengths(split), {name: instances[name] for name in sorted(instances)}]
    return digest(read)


def _vocabulary(folder: Path, _: Path) -> str:
    return digest(open_vocabulary(str(folder / "vocab.txt")).to_json())


def _resumed(folder: Path, _: Path) -> str:
    """Resumes as a run does. A step that was passed over has to be kept."""
    abstract = plan_state(make_mesh(CONFIG.mesh), CONFIG, MODEL)[1].abstract
    newest = newest_intact(epath.Path(folder))
    assert newest is not None
    checkpointer = Checkpointer(epath.Path(folder), keep=2, config=CONFIG, tokenizer=newest.tokenizer)
    try:
        step, state = checkpointer.restore(newest.step, abstract)
    finally:
        checkpointer.close()
    last = str(STEPS[-1])
    if step != STEPS[-1] and not any((folder / "checkpoints").glob(f"{last}.damaged*")):
        raise RuntimeError(f"step {last} was not kept")
    return digest([step, state])


def _evaluated(folder: Path, _: Path) -> str:
    found = open_checkpoint(str(folder))
    return digest([
        found.step, found.bert_config.to_dict(), found.tokenizer.to_json(), found.heads, found.config,
        found.dataset_hashes, found.first_rows, found.load_parameters(),
    ])  # fmt: skip


def _metrics(folder: Path, _: Path) -> str:
    return digest(_UNKNOWN_KEY.sub("", repr(read_metrics(epath.Path(folder)))))


def _reported(folder: Path, path: Path) -> str:
    read = read_reported([str(folder if path.name == "config.json" else path)])
    text = repr(read).replace(str(folder), "").replace(folder.name, "")
    return hashlib.sha256(_UNKNOWN_KEY.sub("", text).encode()).hexdigest()[:16]


def _provenance(folder: Path, path: Path) -> str:
    provenance.append(epath.Path(folder), {})
    return digest(json.loads(path.read_text("utf-8"))["runs"])


def _exported(folder: Path, _: Path) -> str:
    source = huggingface_reading.read(epath.Path(folder))
    return digest([source.bert_config.to_dict(), source.tokenizer.to_json(), source.heads, source.read_parameters()])


def _events(_: Path, path: Path) -> str:
    """Reads events as TensorBoard does."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.tensorflow_stub import errors

    try:
        events = list(RawEventFileLoader(str(path)).Load())
    except (errors.DataLossError, errors.OutOfRangeError) as error:
        raise InputError(f"{path}: {error}") from error
    return digest([bytes(event) for event in events])


_UNKNOWN_KEY = re.compile(r", '[^']{8,11}': '[0-9a-f]{16}'")
"""A checksum whose key has a flipped bit, which readers ignore as any unknown key."""
_STEP = f"checkpoints/{STEPS[-1]}"
KINDS = {
    "dataset: shards": Kind("data", ("*.array_record",), _dataset),
    "dataset: lengths, token counts": Kind("data", ("*.npy",), _dataset),
    "dataset: dataset.json": Kind("data", ("dataset.json",), _dataset),
    "dataset: vocabulary": Kind("data", ("vocab.txt",), _dataset),
    "vocabulary and its record": Kind("vocabulary", ("vocab.txt*",), _vocabulary),
    "checkpoint: arrays, resumed": Kind("run", (f"{_STEP}/*/**/d/*",), _resumed, _STEP),
    "checkpoint: arrays, evaluated": Kind("run", (f"{_STEP}/parameters/**/d/*",), _evaluated, _STEP),
    "checkpoint: nodes and metadata of arrays, resumed": Kind(
        "run", (f"{_STEP}/*/**/manifest.ocdbt", f"{_STEP}/*/_METADATA", f"{_STEP}/*/_sharding",
                f"{_STEP}/*/array_metadatas/*", f"{_STEP}/_CHECKPOINT_METADATA"), _resumed, _STEP,
    ),
    "checkpoint: position, config, tokenizer, digests, resumed": Kind("run", (f"{_STEP}/*/metadata",), _resumed, _STEP),
    "checkpoint: the same, evaluated": Kind("run", (f"{_STEP}/*/metadata",), _evaluated, _STEP),
    "metrics.jsonl": Kind("workdir", ("metrics.jsonl",), _metrics, "workdir"),
    "config.json": Kind("workdir", ("config.json",), _reported),
    "provenance.json": Kind("workdir", ("provenance.json",), _provenance),
    "milestones.json": Kind("records", ("milestones.json",), lambda folder, _: digest(
        sorted(MilestoneRecord(epath.Path(folder)).steps)
    )),
    "result.json": Kind("records", ("result.json",), lambda _, path: digest(
        _UNKNOWN_KEY.sub("", repr(read_result(epath.Path(path))))
    )),
    "search.json": Kind("records", ("search.json",), _reported),
    "table.json of a study": Kind("records", ("table.json",), _reported),
    "export: weights": Kind("export", ("model.safetensors",), _exported),
    "export: config, vocabulary": Kind(
        "export", ("config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json"), _exported
    ),
    "event files": Kind("workdir", ("tensorboard/**/*tfevents*",), _events, has_digest=False),
}  # fmt: skip


def make_inputs(made: Path, folder: Path) -> None:
    """Makes the files from the outputs of commands in `made`; does nothing if an earlier campaign has made them."""
    if (folder / "complete").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made / "data32", folder / "data")
    (folder / "vocabulary").mkdir()
    for name in ("vocab.txt", "vocab.txt.json"):
        shutil.copy(made / name, folder / "vocabulary")
    shutil.copytree(made / "base", folder / "workdir", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(made / "exported", folder / "export")
    _make_records(made, folder / "records")
    _make_steps(folder / "run")
    (folder / "complete").touch()


def _make_records(made: Path, folder: Path) -> None:
    folder.mkdir()
    shutil.copy(made / "classifier" / "result.json", folder)
    shutil.copy(made / "studied" / "table.json", folder)
    shutil.copy(next((made / "studied").rglob("search.json")), folder)
    MilestoneRecord(epath.Path(folder)).add(range(0, 2000, 100), write=True)


def _make_steps(workdir: Path) -> None:
    """Saves two steps of random numbers."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(97 + n % 26) * (1 + n // 26) for n in range(123))]
    tokenizer = WordPieceTokenizer(pieces, lowercase=True)
    abstract = plan_state(make_mesh(CONFIG.mesh), CONFIG, MODEL)[1].abstract
    checkpointer = Checkpointer(epath.Path(workdir), keep=2, config=CONFIG, tokenizer=tokenizer)
    for step in STEPS:
        state = jax.tree.map(_random_array(np.random.default_rng(step), step), abstract)
        checkpointer.save(step, state, bert_config=MODEL, dataset_hashes=["made"])
        checkpointer.wait()
    checkpointer.close()


def _random_array(random: np.random.Generator, step: int) -> Callable[[jax.ShapeDtypeStruct], jax.Array]:
    def make(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = random.normal(size=leaf.shape) if leaf.shape else np.array(step)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return make


def files_of(kind: Kind, inputs: Path) -> list[Path]:
    """Returns the files of a kind, relative to its folder, without empty ones."""
    return sorted(set(_found(kind, inputs / kind.folder)))


def _found(kind: Kind, folder: Path) -> Iterator[Path]:
    for pattern in kind.files:
        for path in folder.glob(pattern):
            if path.is_file() and path.stat().st_size and "provenance" not in path.parent.name:
                yield path.relative_to(folder)
