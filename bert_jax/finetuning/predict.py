"""Predictions of a fine-tuned model for a file, as JSON lines."""

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
    """Writes a JSON line for each example of `source`, in its order, and returns how many there are.

    Each has `id` and `prediction`, and by kind of task:

    text, glue: the class, and `probabilities` by class; of a regression the score.
    choice: the ending's number from 0, and `probabilities` in the order of the endings.
    ner: the tag of each of the `words`.
    squad: the answer, its `probability` among the best and, of 2.0, `null_odds`; "" is no answer.

    Rows that cannot be used are left out, named and counted.

    Args:
      checkpoint: a workdir of fine-tuning, or one of its checkpoints.
      source: a file as those trained on; no label is looked at. Of a tagger also plain text, with a sentence a line.
      output: the file to write; its folder is made where it is missing.
      texts: columns of the text or the two texts; by default those of the file trained on.
      strict: whether a row that cannot be used is an InputError.
      batch_size: examples of a batch.
      bars: how progress is shown.

    Raises:
      InputError: the checkpoint is not fine-tuned, the file cannot be read, or is not of the form of the one trained on
        (one text or two a row, the number of endings).
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
        for said in split.predictions(outputs):
            file.write((json.dumps(said, ensure_ascii=False) + "\n").encode())
    return len(examples)
