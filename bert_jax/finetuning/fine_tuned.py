"""Fine-tuned checkpoints: loading, prediction for a file, and scoring on labelled files."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.finetuning.batches import LoadedModel, load_model
from bert_jax.finetuning.results import describe_result
from bert_jax.finetuning.task import BadRows, Split, format_predictions, read_split
from bert_jax.finetuning.tasks.kinds import task_of
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.progress import Bars, silent
from bert_jax.training.checkpoints import Checkpoint
from bert_jax.training.evaluation import check_batch_size
from bert_jax.training.train_step import compute_dtype


def open_model(
    found: Checkpoint, *, batch_size: int = 64, dtype: str = "auto", devices: Sequence[jax.Device] | None = None
) -> LoadedModel:
    """Loads the parameters of a fine-tuned checkpoint; `dtype` is the config's. For the rest see `load_model`."""
    check_batch_size(batch_size)
    assert found.task is not None
    return load_model(
        found, batch_size=batch_size, max_seq_len=found.task["max_seq_len"], dtype=compute_dtype(dtype),
        devices=devices, build=BertForTask, head=TaskHead.from_dict(found.task),
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
    found: Checkpoint, source: str, output: str, *, texts: Sequence[str] = (), with_text: bool = False,
    strict: bool = False, batch_size: int = 64, bars: Bars = silent,
) -> int:  # fmt: skip
    """Writes the prediction for each example of `source`, in its order, and returns the number of examples.

    Each is a JSON line, or a row of a table if the name of `output` ends in .csv or .tsv (see `format_predictions`). It
    has the `id` of its row (the column id, idx, guid or index, else the row's number) and `prediction`, and by kind of
    task:

    text, glue: the class, and `probabilities` by class; for a regression the score.
    choice: the ending's number from 0, and `probabilities` in the order of the endings.
    ner: the tag of each of the `words`.
    squad: the answer, its `probability` among the n best and, for 2.0, `null_odds`; "" is no answer.

    With `with_text`, after `id`: `text`, or `text_a` and `text_b` of a pair; for a choice `context`, `start` and
    `endings` by number; for squad `question` and `context`.

    Bad rows are skipped, logged and counted.

    Args:
      found: a fine-tuned checkpoint.
      source: a file in the training file's format, labels ignored. For a tagger also a table with a text per row.
      output: the file to write; its folder is created if missing.
      texts: one or two text columns; by default those of the training file.
      with_text: write the texts of each example, too.
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
    task = task_of(found)
    split = read_split(
        task, "input", source, BadRows(strict=strict), found.tokenizer, labels="ignored", columns=texts
    )  # fmt: skip
    atomic.check_file_output(output)
    model = open_model(found, batch_size=batch_size, dtype=found.config.get("dtype", "auto"))
    predictions = task.predictions(split, _outputs(model, split, bars))
    if with_text:
        both = zip(predictions, split.examples, strict=True)
        predictions = [{"id": row["id"], **task.texts_of(example), **row} for row, example in both]
    atomic.write_whole(epath.Path(output), format_predictions(output, predictions))
    return len(split.examples)


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
