"""SQuAD 1.1 and 2.0: predicts the start and the end of the answer, in windows of its paragraph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.rows import BadRows
from bert_jax.finetuning.task import Labels, Outputs, Split, Task
from bert_jax.finetuning.tasks.squad_files import Question, read_questions
from bert_jax.finetuning.tasks.squad_metrics import best_thresholds, score_v1, score_v2
from bert_jax.finetuning.tasks.squad_spans import Answers, answer_questions, build_windows, write_answers
from bert_jax.text.tokenizer import Tokenizer

_ROUNDING = 1e-4  # of logits


@dataclass(frozen=True, kw_only=True)
class SquadTask(Task):
    """Questions whose answers are spans of a paragraph; in version 2.0 some have no answer.

    Attributes:
      doc_stride, max_query_length: see `build_windows`.
      n_best, max_answer_length: see `answer_questions`.
      null_threshold: null odds above which the prediction is "no answer", tuned for F1 on the first scored split. None
        if it is unknown: predictions then use 0, and scores the best threshold for the scored data, as in the paper.
    """

    name: str = "squad/1.1"
    kind: str = "span"
    max_seq_len: int = 384
    doc_stride: int = 128
    max_query_length: int = 64
    n_best: int = 20
    max_answer_length: int = 30
    null_threshold: float | None = None

    @classmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        task = config.task
        if task.test:
            raise InputError(
                f"task.test={task.test}: SQuAD has no split to predict alone; run `bert-jax predict` on it afterwards"
            )
        return cls(
            name=f"squad/{'2.0' if task.version_2 else '1.1'}", max_seq_len=task.max_seq_len,
            doc_stride=task.doc_stride, max_query_length=task.max_query_length, n_best=task.n_best,
            max_answer_length=task.max_answer_length,
        )  # fmt: skip

    @property
    def version_2(self) -> bool:
        """True if a question may have no answer (SQuAD 2.0)."""
        return self.name.endswith("/2.0")

    @property
    def size(self) -> int:
        return 2

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("best_f1", "best_exact", "f1", "exact") if self.version_2 else ("f1", "exact_match")

    # --- Files --------------------------------------------------------------------------------------------------------

    @property
    def usual_files(self) -> Mapping[str, Sequence[str]]:
        return {split: (f"{split}-v{self.name.partition('/')[2]}.json",) for split in ("train", "dev")}

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labels: Labels = "required",
        columns: Sequence[str] = (),
    ) -> list[Question]:  # fmt: skip
        """Reads questions; a score is of all of a file, and so refuses a file with one that has no known answer."""
        if columns:
            raise InputError(f"text={' '.join(columns)}: SQuAD has fixed keys; omit it")
        questions = read_questions(path, bad_rows, training=split == "train")
        if split == "train":
            return [question for question in questions if self.is_labelled(question)]
        unanswered = [question.id for question in questions if not self.is_labelled(question)]
        if labels == "required" and unanswered:
            raise InputError(
                f"{path}: {len(unanswered)} questions without an answer, such as {unanswered[0]}; expected answers, or "
                "is_impossible in SQuAD 2.0 (config=finetune/squad:2.0)"
            )
        return questions

    def from_texts(self, texts: Sequence[str], pairs: Sequence[Any]) -> list[Question]:
        if not all(isinstance(pair, str) for pair in pairs):
            raise InputError("pair: expected a paragraph as the pair of each question")
        both = zip(texts, pairs, strict=True)
        return [Question(str(number), "", text, pair, ()) for number, (text, pair) in enumerate(both)]

    def is_labelled(self, example: Question) -> bool:
        return bool(example.answers) or (self.version_2 and example.is_impossible)

    def texts_of(self, example: Question) -> dict[str, Any]:
        return {"question": example.question, "context": example.context}

    # --- Model --------------------------------------------------------------------------------------------------------

    def encode(self, examples: Sequence[Question], tokenizer: Tokenizer, *, labelled: bool) -> EncodedExamples:
        windows = build_windows(
            examples, tokenizer, max_seq_len=self.max_seq_len, doc_stride=self.doc_stride,
            max_query_length=self.max_query_length,
        )  # fmt: skip
        spans = [(window.start, window.end) for window in windows]
        labels = np.array(spans, np.int32).reshape(-1, 2) if labelled else None
        return EncodedExamples([window.sequence for window in windows], labels, windows=windows)

    def _answers(self, split: Split, outputs: Outputs) -> Answers:
        starts, ends = ([window_outputs[:, side] for window_outputs in outputs] for side in range(2))
        return answer_questions(
            split.examples, split.encoded.windows, starts, ends, n_best=self.n_best,
            max_answer_length=self.max_answer_length, version_2=self.version_2,
        )  # fmt: skip

    def _threshold(self, split: Split, answers: Answers) -> float:
        """Returns the null odds above which there is no answer: the record's, or the best for F1 of labelled data."""
        if not self.version_2 or self.null_threshold is not None or not split.is_labelled:
            return self.null_threshold or 0.0
        return best_thresholds(split.examples, answers.best, answers.null_odds)["f1"].threshold

    def score(self, split: Split, outputs: Outputs) -> dict[str, float]:
        answers = self._answers(split, outputs)
        if self.version_2:
            return score_v2(split.examples, answers.best, answers.null_odds, self._threshold(split, answers))
        return score_v1(split.examples, answers.best)

    def tuned(self, scores: Mapping[str, float]) -> Self:
        """Returns the task with the threshold that is best for F1.

        It is the null odds of a question, which another batch size rounds otherwise: the record's is just above.
        """
        best = scores.get("best_f1_thresh")
        return self if best is None else replace(self, null_threshold=best + _ROUNDING)

    def predictions(self, split: Split, outputs: Outputs) -> list[dict[str, Any]]:
        """Returns predictions with `probability` among the n best and, for 2.0, `null_odds`; "" is no answer."""
        answers = self._answers(split, outputs)
        rows = []
        for key, text in answers.predictions(self._threshold(split, answers)).items():
            probabilities = {candidate.text: candidate.probability for candidate in answers.nbest[key]}
            odds = {"null_odds": answers.null_odds[key]} if self.version_2 else {}
            rows.append({"id": key, "prediction": text, "probability": probabilities.get(text), **odds})
        return rows

    def write(self, split: Split, outputs: Outputs, folder: epath.Path) -> None:
        answers = self._answers(split, outputs)
        write_answers(folder, answers, self._threshold(split, answers))
