"""Fine-tuned checkpoints: loading, prediction for a file, and scoring on labelled files."""

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax.config_keys import TaskKeys
from bert_jax.data.corpora.tfds_corpus import is_tfds
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.finetuning.forward import LoadedModel, load_model
from bert_jax.finetuning.inputs.batching import Encoding
from bert_jax.finetuning.inputs.task_files import BadRows
from bert_jax.finetuning.prediction_files import write_predictions
from bert_jax.finetuning.results import RESULT_FILE, describe_result, read_result
from bert_jax.finetuning.task import Split, with_main_metric
from bert_jax.finetuning.task_kinds import TASK_KINDS, Record, TrainedTask
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.progress import Bars, silent
from bert_jax.sections import to_dict
from bert_jax.training.checkpoints import Checkpoint
from bert_jax.training.evaluation import check_batch_size
from bert_jax.training.train_step import compute_dtype

log = logging.getLogger(__name__)


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


def trained_task(found: Checkpoint) -> TrainedTask:
    """Returns the task of a fine-tuned checkpoint. InputError if it is not fine-tuned, or has an unknown task."""
    if found.task is None:
        raise InputError(f"{found.path}: not a fine-tuned checkpoint; give the --workdir of `bert-jax finetune`")
    kind = TASK_KINDS.get(found.task["name"].partition("/")[0])
    if kind is None:
        raise InputError(f"{found.path}: unknown task {found.task['name']!r}; expected one of {', '.join(TASK_KINDS)}")
    last_position = found.bert_config.is_decoder
    return kind.from_record(_record(found), Encoding(found.tokenizer, found.task["max_seq_len"], last_position))


def _record(found: Checkpoint) -> Record:
    """Returns a checkpoint's record, completed from its run's config and then the defaults: old records lack keys."""
    defaults = to_dict(TaskKeys())
    threshold = _null_threshold(found)
    return {**defaults, **found.config.get("task", {}), "null_threshold": threshold, **(found.task or {})}


def _null_threshold(found: Checkpoint) -> float | None:
    """Returns the null odds, tuned on dev by the run, above which SQuAD 2.0 has no answer; None if unknown."""
    path = found.path.parent.parent / RESULT_FILE
    task = found.task or {}
    if task["name"] != "squad/2.0" or "null_threshold" in task:
        return None
    result = read_result(path) if remote.exists(path) else {}
    if result.get("step") != found.step or not result.get("scores"):
        log.warning(
            "%s: null threshold not found in %s; predictions use 0, scores the best threshold for the scored data",
            found.path,
            RESULT_FILE,
        )
        return None
    return float(next(iter(result["scores"].values()))["best_f1_thresh"])


def predict(
    found: Checkpoint,
    source: str,
    output: str,
    *,
    texts: Sequence[str] = (),
    with_text: bool = False,
    strict: bool = False,
    batch_size: int = 64,
    bars: Bars = silent,
) -> int:
    """Writes the prediction for each example of `source`, in its order, and returns the number of examples.

    Each is a JSON line, or a row of a table if the name of `output` ends in .csv or .tsv (see `prediction_files`). It
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
      source: a file in the training file's format, labels ignored. For a tagger also plain text, one sentence per line.
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
    task = trained_task(found)
    bad_rows = BadRows(strict=strict)
    examples = task.read(source, bad_rows, labelled=False, columns=texts)
    bad_rows.report()
    atomic.make_folder(epath.Path(output).parent)
    model = open_model(found, batch_size=batch_size, dtype=found.config.get("dtype", "auto"))
    (split,) = task.make_task({"input": examples}, {}).splits()
    outputs = _outputs(model, split, bars, "predict")
    predictions = split.predictions(outputs)
    if with_text:
        both = zip(predictions, split.inputs(), strict=True)
        predictions = [{"id": prediction["id"], **text, **prediction} for prediction, text in both]
    with atomic.whole_file(output) as file:
        write_predictions(file, output, predictions)
    return len(examples)


def evaluate_finetuned(found: Checkpoint, data: str, *, batch_size: int = 64, bars: Bars = silent) -> dict[str, Any]:
    """Scores a fine-tuned model with its task's metrics, as at the end of fine-tuning.

    Returns the dict of `describe_result`; the split of a file has the file's name.

    Args:
      found: a fine-tuned checkpoint.
      data: a labelled file in the training file's format, or a folder of such files under their usual names.
      batch_size: examples per batch.
      bars: creates progress bars.

    Raises:
      InputError: the checkpoint is not fine-tuned, a file cannot be read or does not have the task's format, or a label
        is missing or unknown to the model.
    """
    check_batch_size(batch_size)
    task = trained_task(found)
    is_folder = is_tfds(data) or remote.parse_path(data).is_dir()
    files = task.files(data) if is_folder else {"": data}
    bad_rows = BadRows(strict_labels=True)
    examples, skipped = {}, {}
    for split_name, path in files.items():
        file_name = Path(path).name
        name = split_name or ("train_file" if file_name == "train" else file_name)  # a split `train` is not scored
        examples[name] = task.read(path, bad_rows, split=split_name, labelled=True)
        skipped[name] = bad_rows.take_reasons()
    bad_rows.report()
    scored = with_main_metric(task.make_task(examples, skipped), _record(found)["main_metric"])
    model = open_model(found, batch_size=batch_size, dtype=found.config.get("dtype", "auto"))
    scores: dict[str, dict[str, float]] = {}
    splits = scored.splits()
    for split in splits:
        if split.score is None:
            raise InputError(f"{files[split.name]}: labels not found; scoring requires them")
        scores[split.name] = split.score(_outputs(model, split, bars, split.name))
    return describe_result(scored, splits, found.step, scores)


def _outputs(model: LoadedModel, split: Split, bars: Bars, title: str) -> list[np.ndarray]:
    with closing(bars(total=model.predictor.batches(split.examples), desc=title, unit="batch")) as bar:
        return model.outputs(split.examples, lambda: bar.update(1))
