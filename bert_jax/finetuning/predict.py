"""Prediction of a fine-tuned model for a file, as JSON lines."""

import json
from collections.abc import Sequence
from contextlib import closing

from etils import epath

from bert_jax.files import atomic
from bert_jax.finetuning.fine_tuned import open_model, trained_task
from bert_jax.finetuning.inputs.bad_rows import BadRows
from bert_jax.progress import Bars, silent
from bert_jax.training.checkpointing.checkpoints import open_checkpoint
from bert_jax.training.checks import check_batch_size


def predict(
    checkpoint: str,
    source: str,
    output: str,
    *,
    texts: Sequence[str] = (),
    strict: bool = False,
    batch_size: int = 64,
    bars: Bars = silent,
) -> int:
    """Writes a JSON line for each example of `source`, in its order, and returns the number of examples.

    Each line has `id` and `prediction`, and by kind of task:

    text, glue: the class, and `probabilities` by class; for a regression the score.
    choice: the ending's number from 0, and `probabilities` in the order of the endings.
    ner: the tag of each of the `words`.
    squad: the answer, its `probability` among the n best and, for 2.0, `null_odds`; "" is no answer.

    Bad rows are skipped, logged and counted.

    Args:
      checkpoint: a workdir of fine-tuning, or one of its checkpoints.
      source: a file in the training file's format, labels ignored. For a tagger also plain text, one sentence per line.
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
    found = open_checkpoint(checkpoint)
    task = trained_task(found)
    bad_rows = BadRows(strict=strict)
    examples = task.read(source, bad_rows, labelled=False, columns=texts)
    bad_rows.report()
    atomic.make_folder(epath.Path(output).parent)
    model = open_model(found, batch_size=batch_size)
    (split,) = task.task({"input": examples}, {}).splits()
    with closing(bars(total=-(-len(split.rows) // model.batch_size), desc="predict", unit="batch")) as bar:
        outputs = model.outputs(split.rows, on_batch=lambda: bar.update(1))
    with atomic.whole_file(output) as file:
        for prediction in split.predictions(outputs):
            file.write((json.dumps(prediction, ensure_ascii=False) + "\n").encode())
    return len(examples)
