"""SQuAD as a task: predicts the start and the end of the answer, in windows of its paragraph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.batching import EncodedExamples, Encoding
from bert_jax.finetuning.inputs.squad_files import Question, read_questions
from bert_jax.finetuning.inputs.task_files import BadRows, split_files
from bert_jax.finetuning.task import Outputs, Split
from bert_jax.finetuning.tasks.squad_answers import Answers, answer_questions, write_answers
from bert_jax.finetuning.tasks.squad_metrics import best_thresholds, score_v1, score_v2
from bert_jax.finetuning.tasks.squad_windows import Window, build_windows

METRICS = {False: ("f1", "exact_match"), True: ("best_f1", "best_exact", "f1", "exact")}
"""The metrics that may be the main one, by whether a question may have no answer; the first is the default."""


@dataclass(frozen=True)
class SquadTask:
    """Questions whose answers are spans of a paragraph; in version 2.0 some have no answer.

    Attributes:
      training: the training questions.
      evaluated: the questions of each split to score or predict.
      encoding: tokenizer and maximum length of sequences.
      version_2: True if a question may have no answer (SQuAD 2.0).
      doc_stride, max_query_length: see `build_windows`.
      n_best, max_answer_length: see `answer_questions`.
      null_threshold: null odds above which the prediction is "no answer"; None tunes it on the scored data for F1.
      left_out: numbers of skipped entries of each split, by reason.
      main_metric: one of `METRICS[version_2]`.
    """

    training: Sequence[Question]
    evaluated: Mapping[str, Sequence[Question]]
    encoding: Encoding
    version_2: bool
    doc_stride: int
    max_query_length: int
    n_best: int
    max_answer_length: int
    null_threshold: float | None = None
    left_out: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    main_metric: str = field(kw_only=True)

    kind = "span"
    size = 2
    label_names = ()
    positive_label = None

    @property
    def name(self) -> str:
        return f"squad/{'2.0' if self.version_2 else '1.1'}"

    @property
    def metrics(self) -> tuple[str, ...]:
        return METRICS[self.version_2]

    def record(self) -> dict[str, Any]:
        return {"name": self.name, "doc_stride": self.doc_stride, "max_query_length": self.max_query_length}

    def train(self) -> EncodedExamples:
        windows = self._windows(self.training)
        labels = np.array([(window.start, window.end) for window in windows], np.int32).reshape(-1, 2)
        return EncodedExamples([window.sequence for window in windows], labels)

    def splits(self) -> list[Split]:
        return [self._split(name) for name in self.evaluated]

    def _split(self, name: str) -> Split:
        questions = self.evaluated[name]
        windows = self._windows(questions)

        def answers(outputs: Outputs) -> Answers:
            starts, ends = ([window_outputs[:, side] for window_outputs in outputs] for side in range(2))
            return answer_questions(
                questions, windows, starts, ends,
                n_best=self.n_best, max_answer_length=self.max_answer_length, version_2=self.version_2,
            )  # fmt: skip

        def score(outputs: Outputs) -> dict[str, float]:
            found = answers(outputs)
            if self.version_2:
                return score_v2(questions, found.best, found.null_odds, self._threshold(questions, found))
            return score_v1(questions, found.best)

        def write(outputs: Outputs, folder: epath.Path) -> None:
            found = answers(outputs)
            write_answers(folder, found, self._threshold(questions, found))

        def predictions(outputs: Outputs) -> list[dict[str, Any]]:
            found = answers(outputs)
            texts = found.predictions(self.null_threshold or 0.0)
            return [_prediction(question.id, texts[question.id], found) for question in questions]

        encoded = EncodedExamples([window.sequence for window in windows], None)

        def inputs() -> list[dict[str, Any]]:
            return [{"question": question.question, "context": question.context} for question in questions]

        return Split(name, encoded, score, write, predictions, inputs, questions, self.left_out.get(name, {}))

    def _windows(self, questions: Sequence[Question]) -> list[Window]:
        return build_windows(
            questions, self.encoding.tokenizer, max_seq_len=self.encoding.max_seq_len, doc_stride=self.doc_stride,
            max_query_length=self.max_query_length,
        )  # fmt: skip

    def _threshold(self, questions: Sequence[Question], found: Answers) -> float:
        """Returns the null odds above which there is no answer: the given ones, or the best for F1, as in the paper."""
        if not self.version_2 or self.null_threshold is not None:
            return self.null_threshold or 0.0
        return best_thresholds(questions, found.best, found.null_odds)["f1"].threshold


def _prediction(identity: str, text: str, found: Answers) -> dict[str, Any]:
    """Returns `prediction` ("" is no answer), its `probability` among the n best and, for 2.0, `null_odds`."""
    probabilities = {candidate.text: candidate.probability for candidate in found.nbest[identity]}
    odds = {"null_odds": found.null_odds[identity]} if identity in found.null_odds else {}
    return {"id": identity, "prediction": text, "probability": probabilities.get(text), **odds}


def squad_task(config: FinetuneConfig, encoding: Encoding) -> SquadTask:
    """Reads the official JSON files in `data.path`. InputError if a file cannot be read."""
    task = config.task
    if task.test:
        raise InputError(
            f"task.test={task.test}: SQuAD does not support a test file; set task.dev, which is predicted and scored"
        )
    version = "v2.0" if task.version_2 else "v1.1"
    files = split_files(config, {"train": (f"train-{version}.json",), "dev": (f"dev-{version}.json",)})
    bad_rows = BadRows(strict=config.data.strict)
    training = read_questions(files["train"], bad_rows, training=True)
    if not task.version_2:
        training = [question for question in training if not question.is_impossible]
    bad_rows.take_reasons()
    evaluated, left_out = {}, {}
    if "dev" in files:
        evaluated["dev"] = read_questions(files["dev"], bad_rows, training=False)
        left_out["dev"] = bad_rows.take_reasons()
    bad_rows.report()
    unanswered = [question for question in evaluated.get("dev", ()) if not question.answers]
    if not task.version_2 and unanswered:
        raise InputError(
            f"{files['dev']}: question {unanswered[0].id} and {len(unanswered) - 1} others have no answer; for "
            "SQuAD 2.0 use --config=finetune/squad:2.0"
        )
    return SquadTask(
        training, evaluated, encoding, version_2=task.version_2, doc_stride=task.doc_stride,
        max_query_length=task.max_query_length, n_best=task.n_best, max_answer_length=task.max_answer_length,
        left_out=left_out, main_metric=METRICS[task.version_2][0],
    )  # fmt: skip
