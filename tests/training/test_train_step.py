"""The step on one device, and the same step on meshes of eight."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import batches, models, modernbert
from support.models import assert_close

from bert_jax.ahead_of_time.hlo import read_collectives
from bert_jax.config import load_config
from bert_jax.config_keys import MeshKeys, OptimizerKeys
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.parallel.mesh import make_mesh, put_batch, put_everywhere
from bert_jax.parallel.sharding import partition_spec
from bert_jax.training import objectives
from bert_jax.training.evaluation import make_eval_step
from bert_jax.training.optimizer import learning_rate_schedule, make_optimizer
from bert_jax.training.train_step import StateSpec, TrainStep, describe_state, key_data, make_train_step

CONFIG = models.SMALL
WITHOUT_DROPOUT = BertConfig(**{**CONFIG.to_dict(), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
ROWS, LENGTH, PREDICTIONS = 16, 16, 4


make_batch = functools.partial(batches.make_batch, rows=ROWS, length=LENGTH, predictions=PREDICTIONS, vocab_size=200)


@functools.cache
def _programs(
    model: BertConfig, sizes: tuple[int, ...], nsp: bool, scan_layers: bool, zero1: bool,
    gradient_reduce_dtype: jnp.dtype, optimizer: tuple[tuple[str, object], ...],
) -> tuple[Mesh, StateSpec, TrainStep]:  # fmt: skip
    """Mesh, plan of the state and step, traced once for all tests that run the same."""
    mesh = make_mesh(MeshKeys(*sizes), jax.devices()[: math.prod(sizes)])
    config = load_config("default", [(f"optimizer.{name}", str(value)) for name, value in optimizer]).optimizer
    transformation = make_optimizer(config, abstract_parameters(model)[2])
    spec = describe_state(mesh, model, transformation, seed=0, zero1=zero1, scan_layers=scan_layers)
    step = make_train_step(
        mesh, spec, transformation, learning_rate_schedule(1e-2, 2, 100), objectives.pretraining(nsp=nsp),
        seed=0, gradient_reduce_dtype=gradient_reduce_dtype,
    )  # fmt: skip
    return mesh, spec, step


class Run:
    """A state and its step on a mesh."""

    def __init__(
        self,
        model=WITHOUT_DROPOUT,
        *,
        data=1,
        fsdp=1,
        tensor=1,
        microbatches=1,
        nsp=True,
        scan_layers=True,
        zero1=False,
        gradient_reduce_dtype=jnp.float32,
        **optimizer,
    ):
        self.microbatches = microbatches
        self.mesh, self.spec, self.step = _programs(
            model, (data, fsdp, tensor), nsp, scan_layers, zero1, gradient_reduce_dtype, tuple(optimizer.items())
        )
        self.state = self.spec.make()

    def __call__(self, batch):
        with jax.set_mesh(self.mesh):
            self.state, metrics = self.step(self.state, put_batch(self.mesh, batch, self.microbatches))
        return {name: value.item() for name, value in metrics.items()}

    def parameters(self):
        return jax.device_get(self.state.parameters)


@pytest.fixture(scope="module")
def one_device():
    run = Run(CONFIG)
    return [run(make_batch(step)) for step in range(3)], run.parameters()


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"data": 8, "zero1": True}, marks=pytest.mark.long),
        pytest.param({"fsdp": 8}, marks=pytest.mark.long),
        pytest.param({"tensor": 4}, marks=pytest.mark.long),
        pytest.param({"data": 4, "tensor": 2}, marks=pytest.mark.long),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2, "zero1": True}, marks=pytest.mark.long),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2, "microbatches": 4}, marks=pytest.mark.long),
        pytest.param({"data": 8, "zero1": True, "scan_layers": False}, marks=pytest.mark.long),
        {"data": 2, "fsdp": 2, "tensor": 2, "zero1": True, "scan_layers": False, "microbatches": 4},
    ],
    ids=lambda sizes: "-".join(f"{axis}{size}" for axis, size in sizes.items()),
)
def test_step_with_dropout_is_the_same_on_every_mesh(sizes, one_device):
    metrics, parameters = one_device
    run = Run(CONFIG, **sizes)
    got = [run(make_batch(step)) for step in range(3)]
    for a, b in zip(got, metrics, strict=True):
        for name in ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "grad_norm"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, err_msg=name)
    assert_close(run.parameters(), parameters, rtol=1e-5, atol=2e-5)


def evaluate(run: Run) -> objectives.Sums:
    batch = {**make_batch(0), "unigram_nats": np.ones((ROWS, PREDICTIONS), np.float32)}
    step = make_eval_step(run.mesh, run.spec.graph, run.spec.shardings.parameters, objectives.pretraining(nsp=True))
    with jax.set_mesh(run.mesh):
        return jax.device_get(step(run.state.parameters, put_batch(run.mesh, batch)))


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 1), (4, 1, 2), (2, 1, 1)])
def test_evaluation_is_the_same_on_every_mesh(sizes: tuple[int, int, int], scan_layers: bool):
    """Beside another axis `data` shards some parameters by layer."""
    model = dataclasses.replace(WITHOUT_DROPOUT, num_hidden_layers=4)
    data, fsdp, tensor = sizes
    run = Run(model, data=data, fsdp=fsdp, tensor=tensor, zero1=True, scan_layers=scan_layers)
    specs = [leaf.spec for leaf in jax.tree.leaves(run.spec.shardings.parameters["encoder"]["layers"])]
    assert any(spec[0] == "data" for spec in specs) == (fsdp * tensor > 1)
    assert_close(evaluate(run), evaluate(Run(model)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scan_layers", [pytest.param(True, marks=pytest.mark.long), False])
def test_step_of_modernbert_is_the_same_on_every_mesh(scan_layers: bool):
    switches = {**modernbert.SWITCHES, "local_attention": 4, "num_hidden_layers": 4, "attention_output_dropout": 0.1}
    model = BertConfig(**{**WITHOUT_DROPOUT.to_dict(), **switches})
    alone = Run(model, nsp=False)
    run = Run(model, nsp=False, data=2, fsdp=2, tensor=2, zero1=True, scan_layers=scan_layers, microbatches=2)
    for step in range(2):
        expected, got = alone(make_batch(step)), run(make_batch(step))
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, err_msg=name)
    assert_close(run.parameters(), alone.parameters(), rtol=1e-5, atol=2e-5)


def test_seed_and_schedule_do_not_recompile():
    def program(seed: int, rate: float, warmup: int = 2, total: int = 100, **keys: object) -> str:
        mesh = make_mesh(MeshKeys(data=1, fsdp=1, tensor=1), jax.devices()[:1])
        optimizer = make_optimizer(load_config("default").optimizer, abstract_parameters(CONFIG)[2])
        spec = describe_state(mesh, CONFIG, optimizer, seed=seed)
        schedule = learning_rate_schedule(rate, warmup, total, OptimizerKeys(**keys))
        step = make_train_step(mesh, spec, optimizer, schedule, objectives.pretraining(nsp=True), seed=seed)
        batch = jax.eval_shape(lambda: {name: jnp.asarray(entry)[None] for name, entry in make_batch(0).items()})
        with jax.set_mesh(mesh):
            return step.lower(spec.abstract, batch).as_text()

    first = program(0, 1e-3)
    assert first == program(7, 2e-5)
    assert first == program(0, 1e-3, warmup=3, total=101)
    polynomial = program(0, 1e-3, schedule="polynomial", decay_power=0.5)
    assert polynomial == program(0, 1e-3, total=90, schedule="polynomial", decay_power=2.0) != first
    stable = program(0, 1e-3, schedule="wsd", decay_steps=5)
    assert stable == program(0, 1e-3, schedule="wsd", decay_steps=0.3) != program(0, 1e-3, schedule="constant")


def test_runs_that_differ_in_seed_alone_initialize_by_one_program():
    mesh = make_mesh(MeshKeys(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    optimizer = make_optimizer(load_config("default").optimizer, abstract_parameters(CONFIG)[2])
    specs = [describe_state(mesh, CONFIG, optimizer, seed=seed) for seed in (0, 7)]
    first, second = (spec.initialize.lower(key_data(spec.seed)).as_text() for spec in specs)
    assert first == second


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("lamb", {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.long),
        pytest.param("stable_adamw", {"data": 8, "zero1": True}, marks=pytest.mark.long),
        ("stable_adamw", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("muon", {"data": 8, "zero1": True}),
        ("muon", {"data": 2, "fsdp": 2, "tensor": 2}),
        pytest.param("muon", {"data": 2, "fsdp": 2, "tensor": 2, "zero1": True}, marks=pytest.mark.long),
    ],
)
def test_optimizer_of_whole_tensors_is_invariant_to_mesh_and_layer_scan(name: str, sizes: dict):
    def trained(scan_layers, **sizes):
        run = Run(WITHOUT_DROPOUT, name=name, bias_correction=True, scan_layers=scan_layers, **sizes)
        for step in range(3):
            run(make_batch(step))
        return run.parameters()

    expected = trained(True)
    assert_close(trained(False), expected, rtol=1e-6, atol=1e-6)
    assert_close(trained(True, **sizes), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.long
def test_zero1_shards_the_state_along_data():
    run = Run(data=4, zero1=True)
    run(make_batch(0))
    for tree in (run.state.parameters, run.state.optimizer_state[1].mu, run.state.optimizer_state[1].nu):
        kernel = tree["encoder"]["layers"]["feed_forward"]["up_kernel"]
        assert kernel.addressable_shards[0].data.shape == (2, 8, 64)  # along the first dimension but that of the layers
    found = collectives(Run(data=4, zero1=True, microbatches=2))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.spec.abstract.parameters))
    elements = {kind: sum(n for other, _, n in found if other == kind) for kind, *_ in found}
    # Two biases are not divisible and are all-reduced, with scalars.
    assert parameters - 4 <= elements["all-gather"] <= parameters
    assert parameters - 4 <= elements["reduce-scatter"] <= parameters
    assert elements["all-reduce"] < 100
    assert {depth for _, depth, _ in found} == {0}


@pytest.mark.long
def test_fsdp_beside_tensor_gathers_a_layer_s_pieces_alone():
    run = Run(CONFIG, data=2, fsdp=2, tensor=2, microbatches=4)  # the program of a test above
    layers = run.spec.abstract.parameters["encoder"]["layers"]
    held = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) // 2
        for leaf in jax.tree.leaves(layers) if "fsdp" in leaf.sharding.spec
    )  # fmt: skip
    found = [(kind, n) for kind, depth, n in collectives(run) if depth == 2]
    assert 1.9 * held < sum(n for kind, n in found if kind == "all-gather") / 2 <= 2 * held
    assert sum(n for kind, n in found if kind == "reduce-scatter") == 2 * held


@pytest.mark.long
def test_gradients_are_reduced_in_gradient_reduce_dtype_across_devices_and_float32_within():
    def norms(**settings):
        run = Run(microbatches=4, **settings)
        run(make_batch(0))
        return run.state.optimizer_state[1].mu

    half = {"gradient_reduce_dtype": jnp.bfloat16}
    assert_close(norms(**half), norms(), 0, 0)  # one device: there is nothing to add up across
    whole, rounded = norms(data=2, fsdp=2), norms(data=2, fsdp=2, **half)
    differences = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(a).max()), whole, rounded)
    assert 1e-4 < differences["encoder"]["layers"]["feed_forward"]["up_kernel"] < 2e-2
    assert max(jax.tree.leaves(differences)) < 5e-2


def test_loss_is_sums_over_sums_of_the_whole_batch():
    run = Run(WITHOUT_DROPOUT, microbatches=4)
    batch = make_batch(0)
    logits, nsp_logits = jax.jit(lambda parameters: nnx.merge(run.spec.graph, parameters)(batch))(run.parameters())
    logits, nsp_logits = np.asarray(logits, np.float64), np.asarray(nsp_logits, np.float64)
    log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    weights = batch["masked_weights"]
    picked = np.take_along_axis(log_p, batch["masked_ids"][..., None], -1)[..., 0]
    mlm = -(np.where(weights > 0, picked, 0)).sum() / weights.sum()
    nsp_log_p = nsp_logits - np.logaddexp.reduce(nsp_logits, axis=-1, keepdims=True)
    nsp = -np.take_along_axis(nsp_log_p, batch["next_sentence_labels"][..., None], -1).mean()
    metrics = run(batch)
    np.testing.assert_allclose(metrics["mlm_loss"], mlm, rtol=1e-5)
    np.testing.assert_allclose(metrics["nsp_loss"], nsp, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], mlm + nsp, rtol=1e-5)


def test_first_update_has_a_learning_rate_of_zero():
    run = Run()
    before = run.parameters()
    assert run(make_batch(0))["learning_rate"] == 0
    assert_close(run.parameters(), before, 0, 0)
    assert run(make_batch(1))["learning_rate"] == pytest.approx(5e-3)


def test_nonfinite_step_is_skipped_and_counted():
    run = Run()
    run(make_batch(0))
    run(make_batch(1))
    before = jax.device_get((run.state.parameters, run.state.optimizer_state))
    poisoned = make_batch(2)
    poisoned["masked_weights"] = poisoned["masked_weights"] * np.float32("nan")
    metrics = run(poisoned)
    assert np.isnan(metrics["loss"])
    assert (metrics["nonfinite_steps"], metrics["nonfinite_streak"]) == (1, 1)
    assert_close(jax.device_get((run.state.parameters, run.state.optimizer_state)), before, 0, 0)
    assert run(poisoned)["nonfinite_streak"] == 2
    metrics = run(make_batch(3))
    assert np.isfinite(metrics["loss"])
    assert (metrics["nonfinite_steps"], metrics["nonfinite_streak"]) == (2, 0)
    assert run.state.step == 5
    changed = jax.tree.map(lambda a, b: np.any(a != b), run.parameters(), before[0])
    assert changed["embeddings"]["word"]


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.chain(optax.scale_by_lion(), optax.add_decayed_weights(0.01)), id="lion"),
        pytest.param(optax.trace(0.9, nesterov=True), id="momentum", marks=pytest.mark.long),
        pytest.param(
            optax.scale_by_factored_rms(min_dim_size_to_factor=16), id="adafactor", marks=pytest.mark.long
        ),
        pytest.param(
            optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio()), id="lamb", marks=pytest.mark.long
        ),
        "stable_adamw",
        "muon",
    ],
)  # fmt: skip
def test_step_that_is_not_finite_changes_nothing_but_its_counters_for_any_optimizer(optimizer):
    """A run with such a batch in the middle equals the run in which its update is left out, to the bit."""
    mesh = make_mesh(MeshKeys(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    if isinstance(optimizer, str):
        optimizer = make_optimizer(OptimizerKeys(name=optimizer, grad_clip_norm=0.0), abstract_parameters(CONFIG)[2])
    spec = describe_state(mesh, dataclasses.replace(CONFIG, num_hidden_layers=1), optimizer, seed=0)
    schedule = learning_rate_schedule(1e-3, 0, 10)
    step = make_train_step(mesh, spec, optimizer, schedule, objectives.pretraining(nsp=True), seed=0)

    def trained(numbers, skipped=None):
        with jax.set_mesh(mesh):
            state = spec.make()
            for number in numbers:
                batch = make_batch(number)
                if number == skipped:
                    batch["masked_weights"] = np.where(batch["masked_weights"] > 0, np.float32("nan"), 0)
                if number == 3:  # dropout and learning rate are functions of it
                    state = dataclasses.replace(state, step=put_everywhere(mesh, np.int32(3)))
                state, metrics = step(state, put_batch(mesh, batch))
        return jax.device_get((state, metrics))

    (state, metrics), (expected, _) = trained([0, 1, 2, 3], skipped=2), trained([0, 1, 3])
    assert (state.step, expected.step) == (4, 4)
    assert (metrics["nonfinite_steps"], metrics["nonfinite_streak"]) == (1, 0)
    assert np.isfinite(metrics["loss"])
    assert_close(
        (state.parameters, state.optimizer_state), (expected.parameters, expected.optimizer_state), rtol=0, atol=0
    )


def collectives(run):
    """(kind, depth of loops, elements of the complete arrays per execution) of each collective of the compiled step."""
    batch = jax.eval_shape(lambda: put_batch(run.mesh, make_batch(0), run.microbatches))
    with jax.set_mesh(run.mesh):
        text = run.step.lower(run.spec.abstract, batch).compile().as_text()
    found = read_collectives(text, run.mesh.size)
    return [(one.kind, one.loops, one.bytes * one.instructions // one.count // 4) for one in found]


def test_gradients_are_reduced_once_and_outside_of_both_loops():
    """The loops are those over microbatches and over layers; the sum is of one gradient and of scalars."""
    run = Run(data=8, microbatches=2)
    found = collectives(run)
    assert {(kind, depth) for kind, depth, _ in found} == {("all-reduce", 0)}
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.spec.abstract.parameters))
    assert parameters <= sum(elements for _, _, elements in found) <= parameters + 20


def test_fsdp_gathers_each_layers_weights_and_no_activations():
    run = Run(data=2, fsdp=4, microbatches=2)
    found = collectives(run)
    assert {kind for kind, depth, _ in found if depth} == {"all-gather", "reduce-scatter"}
    layers = run.spec.abstract.parameters["encoder"]["layers"]
    one_layer = sum(leaf.size // 2 for leaf in jax.tree.leaves(layers) if "fsdp" in leaf.sharding.spec)
    gathered = sum(elements for kind, depth, elements in found if (kind, depth) == ("all-gather", 2))
    # Forward, and again in the backward pass, but for biases, which it does not need.
    assert 1.95 * one_layer < gathered <= 2 * one_layer
    scattered = sum(elements for kind, depth, elements in found if (kind, depth) == ("reduce-scatter", 2))
    assert scattered == one_layer
    # Across `data` the sum of gradients is as large as what a device holds.
    held = sum(
        leaf.size // (4 if "fsdp" in leaf.sharding.spec else 1)
        for leaf in jax.tree.leaves(run.spec.abstract.parameters)
    )
    assert held <= sum(elements for kind, _, elements in found if kind == "all-reduce") <= held + 100  # and scalars


def test_dropout_differs_between_steps_and_is_deterministic():
    losses = [[run(make_batch(0))["loss"] for _ in range(2)] for run in (Run(CONFIG), Run(CONFIG))]
    assert losses[0] == losses[1]
    # The first update has a rate of 0, so both steps see the same parameters and batch: only the key differs.
    assert losses[0][0] != losses[0][1]


def test_metrics_are_those_of_the_objectives():
    assert set(Run()(make_batch(0))) == {
        "loss", "learning_rate", "grad_norm", "nonfinite_steps", "nonfinite_streak",
        *objectives.pretraining(nsp=True).denominators(make_batch(0)),
    }  # fmt: skip


def test_operations_are_named_after_their_part_of_the_step():
    """A profile shows these names."""
    run = Run(CONFIG, data=2)
    batch = jax.eval_shape(lambda: put_batch(run.mesh, make_batch(0)))
    with jax.set_mesh(run.mesh):
        text = run.step.lower(run.spec.abstract, batch).as_text(debug_info=True)
    names = {name for path in re.findall(r'loc\("([^"]*)"', text) for name in re.findall(r"\w+", path)}
    assert names >= {
        "embeddings", "encoder", "attention", "feed_forward", "layer_norm", "dropout", "pooler", "mlm_head", "nsp_head",
        "mlm_loss", "gradient_reduction", "optimizer",
    }  # fmt: skip


def test_mesh_axis_shards_one_dimension_only():
    assert partition_spec(("vocab", "embed")) == PartitionSpec("tensor", "fsdp")
    with pytest.raises(Exception, match="duplicate entries for `tensor`"):
        NamedSharding(make_mesh(MeshKeys(1, 1, 2), jax.devices()[:2]), partition_spec(("mlp", "heads")))
