"""Training steps to measure: the model, state and optimizer of a config, on batches that look like Wikipedia's.

Uses the modules of the training step alone, so that it needs only jax, flax, optax, ml_collections and numpy.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from on_gpu.cases import is_out_of_memory
from processes import UnsupportedError

from bert_jax.batch import Batch, HostBatch, map_arrays
from bert_jax.config import PretrainConfig, load_config
from bert_jax.data.loading.packing import most_predictions, pack, pack_batch
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.parallel.mesh import make_mesh, put_batch, put_everywhere
from bert_jax.sections import to_dict
from bert_jax.tracking.throughput import peak_flops, training_flops
from bert_jax.training.objectives import pretraining
from bert_jax.training.optimizer import learning_rate_schedule, make_optimizer
from bert_jax.training.train_step import TrainState, describe_state, key_data, make_train_step, model_settings

VOCAB_SIZE = 30_522
MAX_SEQUENCES = 8
"""Of a packed row; the default of `data.max_sequences`."""
MASK_RATE = 0.15
PREDICTIONS = {128: 20, 512: 76}
"""Of a row with one sequence: NVIDIA's recipe, to which the FLOPs of the record refer."""
POOL = 4096
"""Sequences that rows are packed from."""
LENGTHS = {
    # Lengths at the middles of 16 quantiles, of English Wikipedia as `bert-jax prepare` makes it.
    128: (36, 56, 72, 88, 105, 124, *[128] * 10),
    512: (34, 55, 73, 92, 113, 136, 165, 197, 236, 279, 334, 404, 499, *[512] * 3),
}
GIB = 1 << 30
Result = TypeVar("Result")
HEADROOM = 0.95
"""Share of the allocator's memory that a program may use: the rest is for its fragmentation."""
LEAST_BYTES = 28
"""Bytes of a step per token, layer and hidden unit, at least."""


@dataclass(frozen=True)
class Setting:
    """Config and batch of a step: `rows` of `seq_len` tokens, with one sequence each or packed, in `microbatches`."""

    config: str
    rows: int
    seq_len: int
    packed: bool = False
    microbatches: int = 1
    overrides: tuple[tuple[str, str], ...] = ()
    precision: str | None = None  # of fp32 products; None: JAX's default


def draw_lengths(seq_len: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws sequence lengths int64 [count] from `LENGTHS`, interpolated between its quantiles."""
    quantiles = np.asarray(LENGTHS[seq_len], float)
    places = (np.arange(len(quantiles)) + 0.5) / len(quantiles)
    return np.rint(np.interp(rng.random(count), places, quantiles)).astype(np.int64)


def predictions_of(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Returns the number of predictions of sequences of `lengths` [N]."""
    return np.clip(np.rint(lengths * MASK_RATE).astype(np.int64), 1, PREDICTIONS[seq_len])


def make_sequences(lengths: np.ndarray, seq_len: int, rng: np.random.Generator) -> HostBatch:
    """Makes a batch of random tokens with one sequence of each of `lengths` [N] a row."""
    count, slots, columns = len(lengths), PREDICTIONS[seq_len], np.arange(seq_len)
    real = columns < lengths[:, None]
    order = np.where(real & (columns > 0), rng.random((count, seq_len)), 2.0).argsort(axis=1)[:, :slots]
    weights = (np.arange(slots) < predictions_of(lengths, seq_len)[:, None]).astype(np.float32)
    ids = lambda *shape: rng.integers(1000, VOCAB_SIZE, shape, dtype=np.int32)  # noqa: E731
    one = np.ones((count, 1))
    return {
        "input_ids": np.where(real, ids(count, seq_len), 0).astype(np.int32),
        "token_type_ids": (real & (columns >= lengths[:, None] // 2)).astype(np.int32),
        "positions": np.where(real, columns, 0).astype(np.int32),
        "sequence_ids": real.astype(np.int32),
        "masked_positions": np.where(weights > 0, order, 0).astype(np.int32),
        "masked_ids": ids(count, slots),
        "masked_weights": weights,
        "cls_positions": np.zeros((count, 1), np.int32),
        "next_sentence_labels": rng.integers(0, 2, (count, 1), dtype=np.int32),
        "next_sentence_weights": one.astype(np.float32),
    }


def make_batch(setting: Setting, seed: int = 0) -> tuple[HostBatch, int]:
    """Returns a batch and its number of sequences."""
    rng, seq_len = np.random.default_rng(seed), setting.seq_len
    if not setting.packed:
        return make_sequences(draw_lengths(seq_len, setting.rows, rng), seq_len, rng), setting.rows
    lengths = draw_lengths(seq_len, max(POOL, 2 * MAX_SEQUENCES * setting.rows), rng)
    rows = pack(lengths, seq_len, MAX_SEQUENCES, key=seed)
    rows = rows[rng.permutation(len(rows))[: setting.rows]]
    is_used = rows >= 0
    chosen = lengths[rows[is_used]]
    slots = most_predictions(lambda length: predictions_of(length, seq_len), seq_len, MAX_SEQUENCES)
    return pack_batch(make_sequences(chosen, seq_len, rng), is_used, seq_len, slots, 0), len(chosen)


class Step:
    """Compiled training step of a setting, with its batch on the device; makes its own state.

    Attributes:
      sequences: sequences of the batch.
      flops: model FLOPs of the batch, padding counted.
      compile_seconds: time to trace and compile.
      peak_gib: arguments, results and temporaries of the program, in GiB of one device.

    Raises UnsupportedError for an attention kernel on a CPU.
    """

    def __init__(self, setting: Setting, devices: Sequence[jax.Device] | None = None, seed: int = 0):
        config = load_config(setting.config, [*setting.overrides, ("gradient_accumulation", str(setting.microbatches))])
        self.model = make_model(config)
        self.mesh = make_mesh(config.mesh, devices or jax.devices()[:1])
        platform = self.mesh.devices.flat[0].platform
        if config.attention != "xla" and platform != "gpu":
            raise UnsupportedError(f"attention={config.attention} needs a GPU")
        batch, self.sequences = make_batch(setting, seed)
        slots, per_row = batch["masked_positions"].shape[1], batch["cls_positions"].shape[1]
        self.flops = setting.rows * training_flops(self.model, setting.seq_len, slots, per_row)
        self.batch: Batch[jax.Array] = put_batch(self.mesh, batch, config.gradient_accumulation)
        optimizer = make_optimizer(config.optimizer, abstract_parameters(self.model)[2])
        settings = model_settings(config, self.model.num_hidden_layers, platform, self.mesh)
        self.spec = describe_state(self.mesh, self.model, optimizer, config.seed, **settings)
        schedule = learning_rate_schedule(config.optimizer.learning_rate, 0, 1_000_000)
        step = make_train_step(
            self.mesh, self.spec, optimizer, schedule, pretraining(nsp=self.model.pooler), seed=config.seed
        )
        began = time.perf_counter()
        with jax.set_mesh(self.mesh), jax.default_matmul_precision(setting.precision):
            shapes = map_arrays(
                lambda entry: jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=entry.sharding), self.batch
            )
            self._compiled = step.lower(self.spec.abstract, shapes).compile()
        self.compile_seconds = time.perf_counter() - began
        self._arguments = put_everywhere(self.mesh, (key_data(config.seed), schedule))
        sizes: Any = self._compiled.memory_analysis()
        results = max(0, sizes.output_size_in_bytes - sizes.alias_size_in_bytes)
        self.peak_gib = (sizes.argument_size_in_bytes + results + sizes.temp_size_in_bytes) / GIB

    def __call__(self, state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        """Returns the state after one update, and the metrics; donates `state`."""
        return self._compiled(state, self.batch, *self._arguments)


def make_model(config: PretrainConfig) -> BertConfig:
    """Returns the model of a config, with `VOCAB_SIZE`."""
    return BertConfig.from_dict({**to_dict(config.model), "vocab_size": VOCAB_SIZE})


def bytes_limit(device: jax.Device) -> float | None:
    """Returns the GiB that programs may use on a device; None if the device does not tell, as a CPU."""
    stats = device.memory_stats() or {}
    return HEADROOM * stats["bytes_limit"] / GIB if "bytes_limit" in stats else None


def least_gib(setting: Setting) -> float:
    """Returns the GiB per row that a step needs at least, its state not counted."""
    model = load_config(setting.config, setting.overrides).model
    return LEAST_BYTES * setting.seq_len * model.num_hidden_layers * model.hidden_size / GIB


def largest(settings: Sequence[Setting], measure: Callable[[Step], Result]) -> Result:
    """Returns the measure of the first setting, of descending sizes, that fits on the device.

    A setting that runs out of memory, while it is compiled or measured, does not fit. Settings that are too large by
    `LEAST_BYTES`, or by the measure of a compiled larger one, are not compiled. Raises MemoryError if none fits.
    """
    limit, per_row = bytes_limit(jax.devices()[0]), 0.0
    for setting in settings:
        rows = setting.rows / setting.microbatches
        if limit and max(per_row, least_gib(setting)) * rows > limit:
            continue
        try:
            step = Step(setting)
            if not limit or step.peak_gib <= limit:
                return measure(step)
            per_row = step.peak_gib / rows * 0.9  # the state does not grow with the rows
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        gc.collect()  # frees the state of a step that did not fit
    raise MemoryError(f"out of memory: {settings[-1].rows} rows of {settings[-1].seq_len} tokens")


def seconds_per_step(step: Step, rounds: int, seconds: float) -> float:
    """Returns the median over `rounds` of the seconds of a step; a round takes some `seconds`."""
    one_round = Rounds(step, seconds)
    return statistics.median(one_round() for _ in range(rounds))


class Rounds:
    """Rounds of at most `most` steps on one state, after a warm-up; a call returns the seconds of a step of a round."""

    def __init__(self, step: Step, seconds: float = 1.0, most: int = 50):
        self._step, self._state = step, step.spec.make()
        self._count = 1
        self()
        self._count = max(1, min(most, round(seconds / max(1e-6, self()))))

    def __call__(self) -> float:
        """Runs the steps of a round, until the results are on the device."""
        began = time.perf_counter()
        for _ in range(self._count):
            self._state, metrics = self._step(self._state)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - began) / self._count


def rates(step: Step, seconds: float) -> dict[str, Any]:
    """Returns the columns of a measured step; `mfu` is None on a device whose peak is unknown."""
    peak = peak_flops(jax.devices()[0].device_kind)
    return {
        "rows": step.batch["input_ids"].shape[0] * step.batch["input_ids"].shape[1],
        "step_ms": 1000 * seconds,
        "sequences_per_second": step.sequences / seconds,
        "tflops": step.flops / seconds / 1e12,
        "mfu": step.flops / seconds / peak if peak else None,
        "peak_gib": step.peak_gib,
        "compile_seconds": step.compile_seconds,
    }
