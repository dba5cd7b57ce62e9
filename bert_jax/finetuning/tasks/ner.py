"""Named entity recognition: a softmax over tags at the first piece of each word, without a CRF."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.batching import EncodedExamples, Encoding
from bert_jax.finetuning.inputs.conll import (
    OUTSIDE,
    TaggedSentence,
    entity_scores,
    entity_spans,
    has_tags,
    read_conll,
    tag_names,
    write_conll,
)
from bert_jax.finetuning.inputs.task_files import BadRows, split_files
from bert_jax.finetuning.task import Outputs, Split
from bert_jax.finetuning.tasks.ner_windows import TagWindow, collect_tags, encode_windows

log = logging.getLogger(__name__)

FILES = {
    "train": ("train.conll", "eng.train", "train.txt"),
    "dev": ("dev.conll", "eng.testa", "valid.txt", "dev.txt"),
    "test": ("test.conll", "eng.testb", "test.txt"),
}


@dataclass(frozen=True)
class NerTask:
    """Tagging of the words of sentences, scored by complete entities."""

    sentences: Mapping[str, Sequence[TaggedSentence]]
    tags: tuple[str, ...]
    encoding: Encoding
    document_context: bool
    left_out: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    main_metric: str = "f1"

    name = "ner"
    kind = "tag"
    positive_label = None

    @property
    def metrics(self) -> tuple[str, ...]:
        kinds = sorted({tag[2:] for tag in self.tags if tag != OUTSIDE})
        return ("f1", "precision", "recall", *(f"f1_{kind}" for kind in kinds))

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.tags

    @property
    def size(self) -> int:
        return len(self.tags)

    def record(self) -> dict[str, Any]:
        return {"name": self.name, "tags": list(self.tags), "document_context": self.document_context}

    def train(self) -> EncodedExamples:
        windows = self._windows("train")
        numbers = {name: number for number, name in enumerate(self.tags)}
        labels = []
        for window in windows:
            token_labels = np.full(len(window.sequence.input_ids), -1, np.int32)
            for sentence, word, position in window.words:
                tags = self.sentences["train"][sentence].tags
                assert tags is not None
                token_labels[position] = numbers[tags[word]]
            labels.append(token_labels)
        return EncodedExamples([window.sequence for window in windows], labels)

    def splits(self) -> list[Split]:
        return [self._split(name) for name in self.sentences if name != "train"]

    def _windows(self, name: str) -> list[TagWindow]:
        return encode_windows(
            self.encoding.tokenizer, self.sentences[name], self.encoding.max_seq_len,
            document_context=self.document_context,
        )  # fmt: skip

    def _split(self, name: str) -> Split:
        sentences, windows = self.sentences[name], self._windows(name)

        def predicted(outputs: Outputs) -> list[list[str]]:
            window_tags = [
                [self.tags[int(token_outputs[position].argmax())] for _, _, position in window.words]
                for window, token_outputs in zip(windows, outputs, strict=True)
            ]
            return collect_tags(sentences, windows, window_tags)

        def score(outputs: Outputs) -> dict[str, float]:
            gold = [list(sentence.tags or ()) for sentence in sentences]
            overall, by_type = entity_scores(gold, predicted(outputs))
            type_scores = {f"f1_{kind}": type_score.f1 for kind, type_score in by_type.items()}
            scores = {"f1": overall.f1, "precision": overall.precision, "recall": overall.recall, **type_scores}
            scores.setdefault(self.main_metric, 0.0)  # a type that is neither in the split nor predicted
            return scores

        def write(outputs: Outputs, folder: epath.Path) -> None:
            write_conll(folder / f"{name}.conll", sentences, predicted(outputs))

        def predictions(outputs: Outputs) -> list[dict[str, Any]]:
            return [
                {"id": sentence.id or str(number), "words": list(sentence.words), "prediction": tags}
                for number, (sentence, tags) in enumerate(zip(sentences, predicted(outputs), strict=True), start=1)
            ]

        encoded = EncodedExamples([window.sequence for window in windows], None)
        has_tags = all(sentence.tags is not None for sentence in sentences)

        def inputs() -> list[dict[str, Any]]:
            return [{"text": " ".join(sentence.words)} for sentence in sentences]

        return Split(
            name, encoded, score if has_tags else None, write, predictions, inputs, sentences,
            self.left_out.get(name, {}),
        )  # fmt: skip


def ner_task(config: FinetuneConfig, encoding: Encoding) -> NerTask:
    """Reads CoNLL files in `data.path`; the training file defines the tags. InputError if a file cannot be read."""
    task = config.task
    bad_rows = BadRows(strict=config.data.strict)
    files = split_files(config, FILES)
    sentences, left_out = {}, {}
    for split, path in files.items():
        sentences[split] = read_conll(
            path, bad_rows, word_column=task.word_column, tag_column=task.tag_column,
            labelled=split != "test" or has_tags(path),
        )  # fmt: skip
        left_out[split] = bad_rows.take_reasons()
    bad_rows.report()
    tags = tag_names(sentences["train"])
    if tags == (OUTSIDE,):
        raise InputError(f"{files['train']}: no usable sentence has an entity; expected tags such as B-PER and I-PER")
    for split in sentences:
        if counts := unknown_types(sentences[split], tags):
            log.warning(
                "%s: %d entities have types that do not occur in %s (%s); each counts as missed", files[split],
                sum(counts.values()), files["train"], ", ".join(sorted(counts)),
            )  # fmt: skip
    return NerTask(sentences, tags, encoding, task.document_context, left_out)


def unknown_types(sentences: Sequence[TaggedSentence], tags: Sequence[str]) -> dict[str, int]:
    """Counts the entities whose type is not among `tags`, by type."""
    known = {tag[2:] for tag in tags if tag != OUTSIDE}
    kinds = [kind for sentence in sentences for kind, _, _ in entity_spans(sentence.tags or ())]
    return dict(Counter(kind for kind in kinds if kind not in known))
