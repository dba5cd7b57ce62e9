"""The steps of benchmarks/step_variants.py compute what the step of a run computes."""

import importlib

import jax
import numpy as np
import pytest
from support.batches import make_batch
from support.helpers import REPOSITORY

from bert_jax.config import ConfigDict, load_config
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.parallel.host_batches import put_batch
from bert_jax.parallel.mesh import make_mesh
from bert_jax.training import objectives
from bert_jax.training.optimizer import learning_rate_schedule, make_optimizer
from bert_jax.training.train_step import describe_state, make_train_step

MODEL = BertConfig(
    vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=32,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("make_plain_step", (2, 2, 2)), ("make_data_manual_step", (4, 2, 1)), ("make_data_manual_step", (4, 1, 2))],
)
def test_losses_and_gradient_norms_are_those_of_the_step(
    name: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    variant = getattr(importlib.import_module("step_variants"), name)
    mesh = make_mesh(ConfigDict(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))))
    optimizer = make_optimizer(load_config("default").optimizer, abstract_parameters(MODEL)[2])
    spec = describe_state(mesh, MODEL, optimizer, seed=0)
    batch = make_batch(rows=16, length=16, predictions=4, vocab_size=200)
    metrics = []
    for make_step in (make_train_step, variant):
        step = make_step(
            mesh, spec, optimizer, learning_rate_schedule(1e-2, 2, 100), objectives.pretraining(nsp=True), seed=0
        )
        with jax.set_mesh(mesh):
            state = spec.make()
            for _ in range(3):
                state, values = step(state, put_batch(mesh, batch, 2))
                metrics.append({key: float(value) for key, value in values.items()})
    for ours, theirs in zip(metrics[:3], metrics[3:], strict=True):
        for key in ("loss", "mlm_loss", "nsp_loss", "grad_norm"):
            np.testing.assert_allclose(theirs[key], ours[key], rtol=1e-5, err_msg=key)
