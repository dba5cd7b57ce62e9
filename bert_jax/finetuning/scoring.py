"""Scores of a fine-tuned model on labelled files."""

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
    """Scores a fine-tuned model with its task's metrics, as the end of fine-tuning does.

    Returns what `describe_result` does; a file's split is called by the file's name.

    Args:
      checkpoint: a workdir of fine-tuning, or one of its checkpoints.
      data: a labelled file as those trained on, or a folder that has them under their usual names.
      batch_size: examples of a batch.
      bars: how progress is shown.

    Raises:
      InputError: the checkpoint is not fine-tuned, a file cannot be read or does not have the task's form, or a label
        is missing or is none that the model knows.
    """
    check_batch_size(batch_size)
    found = open_checkpoint(checkpoint)
    task = trained_task(found)
    is_folder = is_tfds(data) or remote.named(data).is_dir()
    files = task.files(data) if is_folder else {"": data}
    bad_rows = BadRows(strict_labels=True)
    examples, left_out = {}, {}
    for split, path in files.items():
        name = split or Path(path).name
        examples[name] = task.read(path, bad_rows, split=split, labelled=True)
        left_out[name] = bad_rows.take_reasons()
    bad_rows.report()
    scored = task.task(examples, left_out)
    model = open_model(found, batch_size=batch_size)
    scores: dict[str, dict[str, float]] = {}
    splits = scored.splits()
    for one in splits:
        if one.score is None:
            raise InputError(f"{files[one.name]}: no labels to score by")
        with closing(bars(total=-(-len(one.rows) // model.batch_size), desc=one.name, unit="batch")) as bar:
            scores[one.name] = one.score(model.outputs(one.rows, functools.partial(bar.update, 1)))
    return describe_result(scored, splits, found.step, scores)
