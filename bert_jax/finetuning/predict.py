"""What a fine-tuned model says of new texts."""

import json
from collections.abc import Sequence

import jax.numpy as jnp
from etils import epath

from bert_jax import whole_files
from bert_jax.config import ConfigDict
from bert_jax.errors import InputError
from bert_jax.finetuning.bad_rows import BadRows
from bert_jax.finetuning.encoded_rows import Rows
from bert_jax.finetuning.examples import encode_examples
from bert_jax.finetuning.prediction import Predictor
from bert_jax.finetuning.text import TextFields, read_texts
from bert_jax.finetuning.text_tasks import probabilities
from bert_jax.model import abstract_parameters
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.progress import Bars, silent
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.checks import check_batch_size, compute_dtype
from bert_jax.training.mesh import make_mesh
from bert_jax.training.sharding import parameter_shardings


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
    """Writes a JSON line for each text of `source`, in its order, and returns how many there are.

    `id`, `prediction` (the class, or the score), and of a classification `probabilities` by class. Rows that cannot be
    used are left out, named and counted.

    Args:
      checkpoint: a workdir of fine-tuning, or one of its checkpoints.
      source: a file as `finetuning/text.py` has them; no label is looked at.
      output: the file to write; its folder is made where it is missing.
      texts: what the columns of the text or the two texts are called; by default as in the file trained on.
      strict: whether a row that cannot be used is an InputError.
      batch_size: rows of a batch.
      bars: how progress is shown.

    Raises:
      InputError: the checkpoint is not of a classification or regression of texts, the file cannot be read, or has one
        text where the model was trained on two, or the other way round.
    """
    check_batch_size(batch_size)
    found = open_checkpoint(checkpoint)
    task = found.task
    if task is None or task["kind"] not in ("classify", "regress"):
        what = "no fine-tuned model" if task is None else f"a model of {task['name']}"
        raise InputError(f"{found.path} is {what}: predict takes a classifier, or a regression, of texts")
    fields = TextFields(tuple(texts or task["texts"]), id=task["id"])
    bad_rows = BadRows(strict=strict)
    examples, _ = read_texts(source, bad_rows, fields=fields, labelled=False)
    bad_rows.report()
    is_pair = examples[0].text_b is not None
    if is_pair != task.get("is_pair", is_pair):
        trained, here = ("two texts", "one") if task["is_pair"] else ("one text", "two")
        raise InputError(f"{found.path} was trained on {trained} a row, and {source} has {here}: --text names columns")
    whole_files.make_folder(epath.Path(output).parent)

    head = TaskHead.of_checkpoint(task)
    mesh = make_mesh(ConfigDict({"data": -1, "fsdp": 1, "tensor": 1}))
    dtype: jnp.dtype = compute_dtype("auto")
    graph, _, axes = abstract_parameters(found.bert_config, build=BertForTask, head=head, dtype=dtype)
    shardings = parameter_shardings(mesh, axes)
    parameters = found.load_parameters(shardings, build=BertForTask, head=head)
    predictor = Predictor(
        mesh, graph, shardings, found.tokenizer,
        batch_size=-(-batch_size // mesh.size) * mesh.size, max_seq_len=task["max_seq_len"],
    )  # fmt: skip
    sequences = encode_examples(found.tokenizer, examples, task["max_seq_len"])
    rows = Rows(sequences, None, last_position=found.bert_config.is_decoder)
    bar = bars(total=-(-len(rows) // batch_size), desc="predict", unit="batch")
    outputs = predictor.run(parameters, rows, on_batch=lambda: bar.update(1))
    bar.close()
    with whole_files.whole_file(output) as file:
        for example, of_example in zip(examples, outputs, strict=True):
            if head.kind == "regress":
                said: dict[str, object] = {"prediction": round(float(of_example[0]), 6)}
            else:
                by_class = dict(zip(task["classes"], probabilities(of_example).round(6).tolist(), strict=True))
                said = {"prediction": task["classes"][int(of_example.argmax())], "probabilities": by_class}
            file.write((json.dumps({"id": example.id, **said}, ensure_ascii=False) + "\n").encode())
    return len(examples)
