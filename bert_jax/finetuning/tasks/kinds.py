"""All kinds of tasks: read from a config to fine-tune a model, and from the record of a fine-tuned one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.finetuning.losses import check_class_weights
from bert_jax.finetuning.rows import BadRows
from bert_jax.finetuning.task import Labels, Split, Task, make_split
from bert_jax.finetuning.tasks.choice import ChoiceTask
from bert_jax.finetuning.tasks.glue import GlueTask
from bert_jax.finetuning.tasks.ner import NerTask
from bert_jax.finetuning.tasks.squad import SquadTask
from bert_jax.finetuning.tasks.text import TextTask
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpoints import Checkpoint

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
    config: FinetuneConfig, tokenizer: Tokenizer, *, last_position: bool = False
) -> tuple[Task, Split, list[Split]]:
    """Reads and encodes the files of a config.

    Returns the task, its training split, and the splits to score or predict.

    `last_position`: the model is pooled from its last token. Raises InputError if a file cannot be read, or if the task
    lacks the main metric or the labels of the config.
    """
    task = KINDS[config.task.kind].from_config(config)
    given = {split: getattr(config.task, split) for split in ("train", "dev", "test")}
    files = task.find(config.data.path, given)
    if "train" not in files:
        usual = ", ".join(task.usual_files.get("train", ()))
        raise InputError(
            f"data.path={config.data.path}: "
            + (f"found none of {usual}; set" if usual else "task.train is empty; set")
            + " the training file with task.train=FILE"
        )
    bad_rows = BadRows(strict=config.data.strict)
    read: dict[str, tuple[list[Any], Labels, Mapping[str, int]]] = {}
    for split, path in {"train": files["train"], **files}.items():
        labels: Labels = task.test_labels if split.startswith("test") else "required"
        if split == "train":
            task, examples = task.read_training(path, bad_rows)
        else:
            examples = task.read(path, bad_rows, split=split, labels=labels)
            bad_rows.warn_of_labels(path, task.unknown_labels(examples))
        read[split] = examples, labels, bad_rows.take_reasons()
    bad_rows.report()
    if (metric := config.task.main_metric) and metric not in task.metrics:
        raise InputError(
            f"task.main_metric={metric}: expected one of {', '.join(task.metrics)}, the metrics of {task.name}"
        )
    check_class_weights(config.task.class_weights, task.label_names)
    task = dataclasses.replace(task, main_metric=metric)
    splits = [
        make_split(
            task, split, examples, tokenizer, labels=labels, training=split == "train", last_position=last_position,
            left_out=left_out,
        )
        for split, (examples, labels, left_out) in read.items()
    ]  # fmt: skip
    return task, splits[0], splits[1:]
