"""Registry of the kinds of tasks."""

from collections.abc import Callable

from bert_jax.config import ConfigDict
from bert_jax.finetuning.inputs.batching import Encoding
from bert_jax.finetuning.task import Task
from bert_jax.finetuning.tasks.choice import choice_task
from bert_jax.finetuning.tasks.ner import ner_task
from bert_jax.finetuning.tasks.squad import squad_task
from bert_jax.finetuning.tasks.text_tasks import glue_task, own_task

TASKS: dict[str, Callable[[ConfigDict, Encoding], Task]] = {
    "glue": glue_task, "text": own_task, "squad": squad_task, "choice": choice_task, "ner": ner_task,
}  # fmt: skip
"""Reads a task, from a config and an encoding, by `task.kind`."""
