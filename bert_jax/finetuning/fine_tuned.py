"""The kinds of tasks, and fine-tuned checkpoints: loading, prediction for a file, and scoring on labelled files."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.text_files import named_format
from bert_jax.finetuning.batches import LoadedModel, load_model
from bert_jax.finetuning.task import BadRows, Split, Task, read_split, write_predictions
from bert_jax.finetuning.tasks.choice import ChoiceTask
from bert_jax.finetuning.tasks.ner import NerTask
from bert_jax.finetuning.tasks.squad import SquadTask
from bert_jax.finetuning.tasks.text import GlueTask, TextTask
from bert_jax.model.task_heads import model_settings
from bert_jax.progress import Bars, silent
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpoints import Checkpoint
from bert_jax.training.evaluation import check_batch_size
from bert_jax.training.train_step import compute_dtype

RESULT_FILE = "result.json"

KINDS: dict[str, type[Task]] = {
    "glue": GlueTask, "text": TextTask, "squad": SquadTask, "choice": ChoiceTask, "ner": NerTask,
}  # fmt: skip
"""By `task.kind`, which is the first part of a record's `name` as well."""


def task_of(found: Checkpoint) -> Task:
    """Returns the task of a fine-tuned checkpoint. InputError if it is not fine-tuned, or has an unknown task."""
    if found.task is None:
        raise InputError(f"{found.path}: not a fine-tuned checkpoint; give the --workdir of `bert-jax finetune`")
    kind = KINDS.get(found.task["name"].partition("/")[0])
    if kind is None:
        raise InputError(f"{found.path}: unknown task {found.task['name']!r}; expected one of {', '.join(KINDS)}")
    return kind.from_record(found.task)


def read_task(
    config: FinetuneConfig, tokenizer: Tokenizer, *, needs_scores: bool = False
) -> tuple[Task, Split, list[Split]]:
    """Reads and encodes the files of a config.

    Returns the task, its training split, and the splits to score or predict. Raises InputError if a file
    cannot be read, and without a dev file if runs are to be compared (`needs_scores`).
    """
    task = KINDS[config.task.kind].from_config(config)
    files = _files(task, config)
    if "train" not in files:
        usual = ", ".join(task.usual_files.get("train", ())) or "it has no usual name"
        raise InputError(f"data.path={config.data.path}: training file not found ({usual}); set task.train=FILE")
    if needs_scores and not any(split.startswith("dev") for split in files):  # a dev file has labels, or is refused
        raise InputError("task.dev: a comparison of runs requires a dev file; set it to a labelled file")
    path, bad_rows = files.pop("train"), BadRows(strict=config.data.strict)
    task, examples = task.read_training(path, bad_rows)
    encoded = task.encode(examples, tokenizer, labelled=True)
    training = Split("train", examples, encoded, is_labelled=True, left_out=bad_rows.counts.pop(path, 0))
    return task, training, [
        read_split(
            task, split, path, bad_rows, tokenizer, split=split,
            labels="required" if split.startswith("dev") else task.test_labels,
        )
        for split, path in files.items()
    ]  # fmt: skip


def digests(config: FinetuneConfig) -> dict[str, str]:
    """Returns the SHA-256 of each file of the task, by split. Raises as `read_whole`."""
    files = _files(KINDS[config.task.kind].from_config(config), config)
    contents = {split: atomic.read_whole(remote.parse_path(path)) for split, path in files.items()}
    return {split: hashlib.sha256(content).hexdigest() for split, content in contents.items()}


def _files(task: Task, config: FinetuneConfig) -> dict[str, str]:
    return task.find(config.data.path, {split: getattr(config.task, split) for split in ("train", "dev", "test")})


# --- Predictions and scores -------------------------------------------------------------------------------------------


def open_model(
    found: Checkpoint, *, batch_size: int = 64, dtype: str = "auto", devices: Sequence[jax.Device] | None = None
) -> LoadedModel:
    """Loads the parameters of a fine-tuned checkpoint; `dtype` is the config's. For the rest see `load_model`."""
    check_batch_size(batch_size)
    assert found.task is not None
    return load_model(
        found, batch_size=batch_size, max_seq_len=found.task["max_seq_len"], dtype=compute_dtype(dtype),
        devices=devices, **model_settings(found.heads, found.task),
    )  # fmt: skip


def predict_texts(
    found: Checkpoint, model: LoadedModel, texts: Sequence[str], pairs: Sequence[Any]
) -> list[dict[str, Any]]:
    """Returns the prediction for each text with its pair or None, as `predict` writes them, without `id`.

    Raises InputError if the task does not support the texts.
    """
    task = task_of(found)
    examples = task.from_texts(texts, pairs)
    split = Split("given", examples, task.encode(examples, found.tokenizer, labelled=False))
    predictions = task.predictions(split, model.outputs(split.encoded))
    return [{key: value for key, value in prediction.items() if key != "id"} for prediction in predictions]


def predict(
    found: Checkpoint, source: str, output: str, *, texts: Sequence[str] = (), strict: bool = False,
    batch_size: int = 64, bars: Bars = silent,
) -> int:  # fmt: skip
    """Writes the prediction for each example of `source`, in its order, and returns the number of examples.

    Each is a JSON line. It has the `id` of its row (the column id, idx, guid or index, else the row's number) and
    `prediction`, and by kind of task:

    text, glue: the class, and `probabilities` by class; for a regression the score.
    choice: the ending's number from 0, and `probabilities` in the order of the endings.
    ner: the tag of each of the `words`.
    squad: the answer, its `probability` among the candidates and, for 2.0, `null_odds`; "" is no answer.

    Bad rows are skipped, logged and counted.

    Args:
      found: a fine-tuned checkpoint.
      source: a file in the training file's format, labels ignored. For a tagger with `texts` a table.
      output: the file to write; its folder is created if missing.
      texts: one or two text columns; by default those of the training file.
      strict: raise InputError for a bad row.
      batch_size: examples per batch.
      bars: creates progress bars.

    Raises:
      InputError: the checkpoint is not fine-tuned, the file cannot be read, or it does not match the training file
        (one or two texts per row, the number of endings).
    """
    check_batch_size(batch_size)
    if remote.absolute(source) == remote.absolute(output):
        raise InputError(f"output={output}: is the input; choose another file")
    if named_format(output) not in ("", "json"):
        raise InputError(f"output={output}: predictions are JSON lines; choose a name that ends in .jsonl")
    task = task_of(found)
    split = read_split(task, "input", source, BadRows(strict=strict), found.tokenizer, labels="ignored", columns=texts)
    atomic.check_file_output(output)
    model = open_model(found, batch_size=batch_size, dtype=found.config.get("dtype", "auto"))
    predictions = task.predictions(split, _outputs(model, split, bars))
    write_predictions(epath.Path(output), predictions)
    return len(split.examples)


def describe_result(
    task: Task, splits: Sequence[Split], step: int, scores: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Returns the contents of `result.json`.

    Keys: `format_version`, `task`, `main_metric`, `step`, `scores` by split, and `rows`: for each scored split the
    numbers `scored` and `left_out` (skipped).
    """
    rows = {
        split.name: {"scored": len(split.examples), "left_out": split.left_out}
        for split in splits if split.name in scores
    }  # fmt: skip
    return {
        "format_version": 1, "task": task.name, "main_metric": task.metrics[0], "step": step,
        "scores": dict(scores), "rows": rows,
    }  # fmt: skip


def evaluate_finetuned(found: Checkpoint, data: str, *, batch_size: int = 64, bars: Bars = silent) -> dict[str, Any]:
    """Scores a fine-tuned model with its task's metrics, as at the end of fine-tuning.

    Returns the dict of `describe_result`; the split of a file has the file's name.

    Args:
      found: a fine-tuned checkpoint.
      data: a labelled file in the training file's format, or a folder with dev files under their usual names.
      batch_size: examples per batch.
      bars: creates progress bars.

    Raises:
      InputError: the checkpoint is not fine-tuned, a file cannot be read or does not have the task's format, or a label
        is missing or unknown to the model. (Entities of a type that training did not have count as missed.)
    """
    check_batch_size(batch_size)
    task, bad_rows = task_of(found), BadRows(strict_labels=True)
    is_folder = remote.parse_path(data).is_dir()
    files = task.find(data, {}) if is_folder else {Path(data).name: data}
    files = {split: path for split, path in files.items() if split.startswith("dev") or not is_folder}
    if not files:
        usual = [name for split, names in task.usual_files.items() if split.startswith("dev") for name in names]
        raise InputError(f"data={data}: expected a labelled file, got a folder without {', '.join(usual) or 'one'}")
    splits = [
        read_split(task, name, path, bad_rows, found.tokenizer, split=name if is_folder else "")
        for name, path in files.items()
    ]
    model = open_model(found, batch_size=batch_size, dtype=found.config.get("dtype", "auto"))
    scores = {split.name: task.score(split, _outputs(model, split, bars)) for split in splits}
    return describe_result(task, splits, found.step, scores)


def _outputs(model: LoadedModel, split: Split, bars: Bars) -> list[np.ndarray]:
    with closing(bars(total=model.predictor.batches(split.encoded), desc=split.name, unit="batch")) as bar:
        return model.outputs(split.encoded, lambda: bar.update(1))
