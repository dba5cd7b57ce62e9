"""Multiple choice (SWAG and others): one sequence per ending, and a softmax over their scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.finetuning import task_metrics
from bert_jax.finetuning.inputs.batching import EncodedExamples, Encoding
from bert_jax.finetuning.inputs.choice_files import ChoiceExample, encode_choices, read_choices, write_choices
from bert_jax.finetuning.inputs.task_files import BadRows, split_files
from bert_jax.finetuning.task import Outputs, Split, softmax

FILES = {
    "train": ("train.csv", "train.tsv", "train.jsonl"),
    "dev": ("val.csv", "dev.csv", "dev.tsv", "dev.jsonl"),
    "test": ("test.csv", "test.tsv", "test.jsonl"),
}


@dataclass(frozen=True)
class ChoiceTask:
    """A choice of the correct one of several endings."""

    examples: Mapping[str, Sequence[ChoiceExample]]
    encoding: Encoding
    left_out: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    main_metric: str = "accuracy"

    name = "choice"
    kind = "choose"
    metrics = ("accuracy",)
    label_names = ()
    positive_label = None

    @property
    def size(self) -> int:
        return len(next(iter(self.examples.values()))[0].endings)

    def record(self) -> dict[str, Any]:
        return {"name": self.name}

    def train(self) -> EncodedExamples:
        return self._encoded("train")

    def splits(self) -> list[Split]:
        return [self._split(name) for name in self.examples if name != "train"]

    def _encoded(self, name: str) -> EncodedExamples:
        examples = self.examples[name]
        groups = encode_choices(self.encoding.tokenizer, examples, self.encoding.max_seq_len)
        labels = None
        if all(example.label is not None for example in examples):
            correct = np.array([example.label for example in examples])
            labels = (np.arange(self.size) == correct[:, None]).astype(np.int32).reshape(-1)
        sequences = [sequence for group in groups for sequence in group]
        return EncodedExamples(sequences, labels, group=self.size, last_position=self.encoding.last_position)

    def _split(self, name: str) -> Split:
        examples, encoded = self.examples[name], self._encoded(name)

        def score(outputs: Outputs) -> dict[str, float]:
            labels = [example.label or 0 for example in examples]
            return task_metrics.compute(self.metrics, labels, np.stack(outputs).argmax(axis=-1))

        def write(outputs: Outputs, folder: epath.Path) -> None:
            write_choices(folder / f"{name}.csv", examples, np.stack(outputs).argmax(axis=-1).tolist())

        def predictions(outputs: Outputs) -> list[dict[str, Any]]:
            return [
                {
                    "id": example.id,
                    "prediction": int(scores.argmax()),
                    "probabilities": softmax(scores).round(6).tolist(),
                }
                for example, scores in zip(examples, outputs, strict=True)
            ]

        def inputs() -> list[dict[str, Any]]:
            return [
                {"context": example.context, "start": example.start, "endings": dict(enumerate(example.endings))}
                for example in examples
            ]

        return Split(
            name, encoded, None if encoded.labels is None else score, write, predictions, inputs, examples,
            self.left_out.get(name, {}),
        )  # fmt: skip


def choice_task(config: FinetuneConfig, encoding: Encoding) -> ChoiceTask:
    """Reads the files in `data.path`, in SWAG's, CODAH's or the generic format.

    Raises InputError if a file cannot be read or has another number of endings.
    """
    bad_rows = BadRows(strict=config.data.strict)
    examples, left_out = {}, {}
    for split, path in split_files(config, FILES).items():
        examples[split] = read_choices(path, bad_rows, labels="optional" if split == "test" else "required")
        left_out[split] = bad_rows.take_reasons()
    bad_rows.report()
    counts = {split: len(split_examples[0].endings) for split, split_examples in examples.items()}
    if len(set(counts.values())) > 1:
        raise InputError(f"data.path={config.data.path}: expected as many endings in every split, got {counts}")
    return ChoiceTask(examples, encoding, left_out)
