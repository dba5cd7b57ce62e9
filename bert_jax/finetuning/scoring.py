"""Scoring of a fine-tuned model on labelled files."""

import functools
from contextlib import closing
from pathlib import Path
from typing import Any

from bert_jax.data.preparation.tfds_corpus import is_tfds
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.finetuning.fine_tuned import open_model, trained_task
from bert_jax.finetuning.finetune import describe_result
from bert_jax.finetuning.inputs.bad_rows import BadRows
from bert_jax.progress import Bars, silent
from bert_jax.training.checkpointing.checkpoints import open_checkpoint
from bert_jax.training.checks import check_batch_size


def evaluate_finetuned(checkpoint: str, data: str, *, batch_size: int = 64, bars: Bars = silent) -> dict[str, Any]:
    """Scores a fine-tuned model with its task's metrics, as at the end of fine-tuning.

    Returns the dict of `describe_result`; the split of a file has the file's name.

    Args:
      checkpoint: a workdir of fine-tuning, or one of its checkpoints.
      data: a labelled file in the training file's format, or a folder of such files under their usual names.
      batch_size: examples per batch.
      bars: creates progress bars.

    Raises:
      InputError: the checkpoint is not fine-tuned, a file cannot be read or does not have the task's format, or a label
        is missing or unknown to the model.
    """
    check_batch_size(batch_size)
    found = open_checkpoint(checkpoint)
    task = trained_task(found)
    is_folder = is_tfds(data) or remote.parse_path(data).is_dir()
    files = task.files(data) if is_folder else {"": data}
    bad_rows = BadRows(strict_labels=True)
    examples, skipped = {}, {}
    for split_name, path in files.items():
        name = split_name or Path(path).name
        examples[name] = task.read(path, bad_rows, split=split_name, labelled=True)
        skipped[name] = bad_rows.take_reasons()
    bad_rows.report()
    scored = task.task(examples, skipped)
    model = open_model(found, batch_size=batch_size)
    scores: dict[str, dict[str, float]] = {}
    splits = scored.splits()
    for split in splits:
        if split.score is None:
            raise InputError(f"{files[split.name]}: labels not found; scoring requires them")
        with closing(bars(total=-(-len(split.rows) // model.batch_size), desc=split.name, unit="batch")) as bar:
            scores[split.name] = split.score(model.outputs(split.rows, functools.partial(bar.update, 1)))
    return describe_result(scored, splits, found.step, scores)
