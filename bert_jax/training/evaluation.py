"""Evaluation of pre-training losses on the eval split, with a unigram baseline."""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from bert_jax.batch import Batch, HostBatch, map_arrays
from bert_jax.config_keys import MeshKeys, PretrainConfig
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import EvalLoader
from bert_jax.errors import InputError
from bert_jax.model import abstract_parameters
from bert_jax.model.bert import Parameters
from bert_jax.parallel.mesh import batch_mesh_axes, make_mesh, put_batch, rows_here
from bert_jax.parallel.sharding import make_forward_step, parameter_shardings
from bert_jax.progress import Bars, silent
from bert_jax.sections import from_mapping
from bert_jax.training.checkpoints import Checkpoint, check_finite, other_vocabulary_error
from bert_jax.training.objectives import Objective, Sums, make_objective, pretraining
from bert_jax.training.phases import plan_at
from bert_jax.training.train_step import StateSpec, compute_dtype

MAX_BATCH_SIZE = 1 << 16
"""Limit in rows outside of training: no device holds more."""
SAMPLE_MASKS = 6
"""Masked positions that a text sample shows."""
SAMPLE_FILLS = 3
_TOKENS_AFTER_MASKS = 8


def unigram_nats(datasets: Sequence[PreparedDataset], *, left_to_right: bool) -> np.ndarray:
    """Returns the loss of each token under the unigram baseline, from target frequencies alone: float64 [V], in nats.

    Masked targets are words of the training documents. A left-to-right model also predicts the [SEP]s, which are in no
    document: they count as often as they are targets in the sequences of the training split.
    """
    counts = np.sum([dataset.token_counts() for dataset in datasets], axis=0).astype(np.float64)
    if left_to_right:
        separators = sum(dataset.size("train") * dataset.separators_per_sequence for dataset in datasets)
        tokens = sum(int(dataset.lengths("train").sum(dtype=np.int64)) for dataset in datasets)
        targets = tokens - sum(dataset.size("train") for dataset in datasets)  # all but [CLS]
        share = separators / max(1, targets)
        counts[datasets[0].tokenizer.sep_id] += counts.sum() * share / (1 - share)
    counts += 1  # smoothing: without it, a token that is not in the training split would make the baseline infinite
    return -np.log(counts / counts.sum())


def make_eval_step(
    mesh: Mesh, graph: nnx.GraphDef[Any], shardings: Parameters, objective: Objective
) -> Callable[[Parameters, Batch[Any]], dict[str, Sums]]:
    """Makes the jitted `(parameters, batch) -> sums` over a batch [1, B, ...]: `numerators` and `denominators`.

    They are those of the objective. The batch also has `unigram_nats`, the loss of each target under the unigram
    baseline; see `Batch`.
    """

    def evaluation_sums(model: Any, rows: Batch[jax.Array]) -> dict[str, Sums]:
        numerators, counts = objective.sums(model, rows, None), objective.denominators(rows)
        numerators["unigram_loss"] = (rows["unigram_nats"] * rows["masked_weights"]).sum()
        counts["unigram_loss"] = rows["masked_weights"].sum()
        here = {"numerators": numerators, "denominators": counts}
        return jax.lax.psum(here, batch_mesh_axes(mesh))

    return make_forward_step(mesh, graph, shardings, evaluation_sums, PartitionSpec())


class Evaluator:
    """Evaluates parameters on a fixed number of `batches`. `run` returns means over all, as sums divided by sums.

    A mixture also has those of each dataset, with its number in `data.path` at the end: `mlm_loss_0`, `mlm_loss_1`.
    """

    def __init__(
        self, mesh: Mesh, graph: nnx.GraphDef[Any], shardings: Parameters, loader: EvalLoader, objective: Objective
    ):  # fmt: skip
        """Prepares an evaluation by the step of `make_eval_step`. Each `run` reads all batches of `loader`."""
        self._objective, self._mesh, self._loader, self.batches = objective, mesh, loader, loader.batches
        self._eval_step = make_eval_step(mesh, graph, shardings, objective)
        self._rows = rows_here(mesh, loader.batch_size)
        self._unigram_nats = unigram_nats(loader.datasets, left_to_right=loader.masking is None)

    def run(self, parameters: Parameters, on_batch: Callable[[], Any] = lambda: None) -> dict[str, float]:
        """Returns `loss, mlm_loss, mlm_accuracy, nsp_loss, nsp_accuracy` and `unigram_loss`; losses in nats.

        Those of each dataset follow if there are several. A left-to-right model has `ltr_loss` and `ltr_accuracy`
        instead. A next-sentence head that is not trained has no loss and no accuracy. `unigram_loss` is the loss of
        predicting every target from the word frequencies of the training split: a model above it has learned nothing
        yet. Calls `on_batch` after each batch.
        """
        is_mixture = len(self._loader.datasets) > 1
        totals: dict[str, np.ndarray] = {}  # numerator and denominator, in float64
        for number in range(self.batches):
            suffixes = ("", f"_{self._loader.source(number)}") if is_mixture else ("",)
            batch = self._loader.batch(number, self._rows)
            batch["unigram_nats"] = self._unigram_nats[batch["masked_ids"]].astype(np.float32)
            placed = put_batch(self._mesh, batch, batch_size=self._loader.batch_size)
            sums = jax.device_get(self._eval_step(parameters, placed))
            for name, numerator in sums["numerators"].items():
                both = np.array([numerator, sums["denominators"][name]], np.float64)
                for suffix in suffixes:
                    totals[name + suffix] = totals.get(name + suffix, 0.0) + both
            on_batch()
        means = {name: float(numerator / count) for name, (numerator, count) in totals.items() if count}
        return {"loss": self._objective.loss(means), "unigram_loss": 0.0, **means}


class MaskedSamples:
    """A few masked texts of the eval split, the same at each evaluation, and the words that the model fills in.

    The program that runs them is small and apart from that of the evaluation. A left-to-right model has no samples.
    """

    def __init__(self, mesh: Mesh, spec: StateSpec, loader: EvalLoader, count: int):
        """Takes the first `count` sequences of `loader`, or all of its first batch if that has fewer."""
        self._count = 0 if loader.masking is None or not loader.batches else min(count, loader.real_rows(0))
        self._mesh, self._tokenizer = mesh, loader.datasets[0].tokenizer
        if not self._count:
            return
        shards = math.prod(mesh.shape[axis] for axis in batch_mesh_axes(mesh))
        self._rows = -(-self._count // shards) * shards  # at most the batch size, which they divide
        self._batch = _mask_first(loader.batch(0, np.arange(self._rows)), self._tokenizer.mask_id)
        self._texts = [self._excerpt(row) for row in range(self._count)]
        top = min(SAMPLE_FILLS, self._tokenizer.vocab_size)
        self._step = make_samples_step(mesh, spec.graph, spec.shardings.parameters, top)

    def fill(self, parameters: Parameters) -> list[dict[str, Any]]:
        """Returns the samples with the fills of `parameters`; all processes have to call it."""
        if not self._count:
            return []
        here = rows_here(self._mesh, self._rows)
        batch = put_batch(self._mesh, map_arrays(lambda entry: entry[here], self._batch), batch_size=self._rows)
        target, probabilities, tokens = jax.device_get(self._step(parameters, batch))
        samples: list[dict[str, Any]] = []
        for row, text in enumerate(self._texts):
            masks = [
                {
                    "target": self._tokenizer.id_to_token(int(self._batch["masked_ids"][row, place])),
                    "probability": float(target[row, place]),
                    "fills": [
                        [self._tokenizer.id_to_token(token), probability]
                        for token, probability in zip(
                            tokens[row, place].tolist(), probabilities[row, place].tolist(), strict=True
                        )
                    ],
                }
                for place in np.flatnonzero(self._batch["masked_weights"][row])
            ]  # fmt: skip
            samples.append({"text": text, "masks": masks})
        return samples

    def _excerpt(self, row: int) -> str:
        """Returns the text of a row, up to some tokens after its last mask."""
        ids = self._batch["input_ids"][row]
        shown = self._batch["masked_positions"][row][self._batch["masked_weights"][row] > 0]
        real = int((self._batch["sequence_ids"][row] > 0).sum())
        stop = min(real, int(shown.max(initial=0)) + 1 + _TOKENS_AFTER_MASKS)
        text = self._tokenizer.decode([token for token in ids[1:stop].tolist() if token != self._tokenizer.sep_id])
        return text if stop == real else f"{text} ..."


def make_samples_step(
    mesh: Mesh, graph: nnx.GraphDef[Any], shardings: Parameters, top: int
) -> Callable[[Parameters, Batch[Any]], tuple[jax.Array, jax.Array, jax.Array]]:
    """Makes the jitted step that returns, for each masked position, the target's probability and the `top` words."""

    def fill_samples(model: Any, rows: Batch[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        probabilities = jax.nn.softmax(model(rows)[0], axis=-1)
        target = jnp.take_along_axis(probabilities, rows["masked_ids"][..., None], axis=-1)[..., 0]
        return (target, *jax.lax.top_k(probabilities, top))

    return make_forward_step(mesh, graph, shardings, fill_samples, PartitionSpec(batch_mesh_axes(mesh)))


def _mask_first(batch: HostBatch, mask_id: int) -> HostBatch:
    """Returns the batch with at most `SAMPLE_MASKS` predictions in a row: [MASK] there, the original words elsewhere.

    In `batch` a tenth of the targets are kept, and a tenth are random words.
    """
    ids, positions, weights = batch["input_ids"].copy(), batch["masked_positions"], batch["masked_weights"]
    for row, (places, targets, used) in enumerate(zip(positions, batch["masked_ids"], weights > 0, strict=True)):
        ids[row, places[used]] = targets[used]
        ids[row, places[used][:SAMPLE_MASKS]] = mask_id
    first = {name: batch[name][:, :SAMPLE_MASKS] for name in ("masked_positions", "masked_ids", "masked_weights")}
    return cast(HostBatch, {**batch, **first, "input_ids": ids})


def evaluate_checkpoint(
    opened: Checkpoint, data: str, *, batch_size: int = 64, bars: Bars = silent
) -> dict[str, float]:  # fmt: skip
    """Evaluates a checkpoint on the whole eval split of a prepared dataset; returns the scores of `Evaluator.run`.

    A head that the checkpoint lacks has no loss and no accuracy, and neither has next-sentence prediction on a dataset
    without pairs.

    Raises InputError if the checkpoint lacks both heads, is damaged or has non-finite parameters; and if the dataset
    has no eval split, another vocabulary, longer sequences than the model, or pairs for a model with one segment.
    """
    check_batch_size(batch_size)
    dataset, mesh = PreparedDataset(data), make_mesh(MeshKeys())
    _check_evaluable(opened, dataset)
    rows = -(-min(batch_size, dataset.size("eval")) // mesh.size) * mesh.size
    config = plan_at(from_mapping(PretrainConfig, opened.config), opened.step).config if opened.config else None
    dtype = compute_dtype(config.dtype if config else "auto")
    graph, _, info = abstract_parameters(opened.bert_config, dtype=dtype, heads=opened.heads)
    shardings = parameter_shardings(mesh, info)
    loader = EvalLoader([dataset], batch_size=rows, left_to_right=opened.bert_config.is_decoder)
    lm = "ltr" if opened.bert_config.is_decoder else "mlm"
    objective = make_objective(config) if config else pretraining(nsp=True, lm=lm)
    evaluator = Evaluator(mesh, graph, shardings, loader, objective)
    parameters = opened.load_parameters(shardings)
    check_finite(opened, parameters)
    with closing(bars(total=evaluator.batches, desc="evaluate", unit="batch")) as bar:
        return evaluator.run(parameters, on_batch=functools.partial(bar.update, 1))


def check_batch_size(batch_size: int) -> None:
    """Raises InputError for an invalid `--batch_size`."""
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise InputError(f"batch_size={batch_size}: must be in 1 to {MAX_BATCH_SIZE}")


def _check_evaluable(opened: Checkpoint, dataset: PreparedDataset) -> None:
    """Raises InputError if a checkpoint and the eval split of a dataset do not match."""
    if "mlm_head" not in opened.heads and not {"pooler", "nsp_head"} <= {*opened.heads}:
        raise InputError(f"{opened.path} has no mlm_head; without it, evaluate needs pooler, nsp_head")
    if dataset.tokenizer.sha256 != opened.tokenizer.sha256:
        raise other_vocabulary_error(opened, dataset)
    if not dataset.size("eval"):
        raise InputError(f"{dataset.folder} has no eval split; prepare it with --eval_fraction above 0")
    if dataset.info.seq_len > opened.bert_config.max_position_embeddings:
        raise InputError(
            f"{dataset.folder} has sequences of {dataset.info.seq_len} tokens, but the model supports at most "
            f"{opened.bert_config.max_position_embeddings}; prepare with a smaller --seq_len"
        )
    if opened.bert_config.type_vocab_size == 1 and dataset.info.options.get("pairs") != "none":
        raise InputError(
            f"{dataset.folder} has pairs of sentences, but the model has no second segment (type_vocab_size=1); "
            "prepare it with --pairs none"
        )
