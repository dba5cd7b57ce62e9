"""ModernBERT by switches: against `transformers` on random weights, packed rows, local blocks; BERT is as it was."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import batches, models, modernbert
from support.models import assert_relative
from support.torch_models import require_torch

from bert_jax.interop.importing import open_source
from bert_jax.interop.weights import layout, state_dict
from bert_jax.model import BertConfig, abstract_parameters, layers
from bert_jax.model.attention import SelfAttention, Visibility, attention_mask, rotary_angles
from bert_jax.training.objectives import divide, pretraining

CONFIG = BertConfig(
    vocab_size=100, hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=80,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **modernbert.SWITCHES,
)  # fmt: skip
BIASES = {f"{part}_bias": True for part in ("attention", "mlp", "norm", "classifier", "decoder")}


def mlm_loss(model, batch, keys=None, *, nsp=False):
    objective = pretraining(nsp=nsp)
    means = divide(objective.sums(model, batch, keys), objective.denominators(batch))
    return sum(means[f"{name}_loss"] for name in ("mlm", *(["nsp"] if nsp else [])))


def test_bert_has_the_parameters_the_loss_and_the_gradients_that_it_had_before_the_switches():
    config = BertConfig(
        vocab_size=100, hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96,
        max_position_embeddings=64,
    )  # fmt: skip
    graph, parameters = models.initialize(config)
    layer = parameters["encoder"]["layers"]
    arrays = [parameters["embeddings"]["word"], layer["attention"]["qkv_kernel"], layer["feed_forward"]["up_kernel"],
              parameters["mlm_head"]["kernel"]]  # fmt: skip
    expected = [68.95693682651898, 300.6497981398485, 200.59314317884935, 32.34987048443418]
    assert [np.abs(np.asarray(array, np.float64)).sum() for array in arrays] == pytest.approx(expected, rel=1e-7)
    batch, keys = batches.make_device_batch(), jax.random.split(jax.random.key(1), 3)
    loss, gradients = jax.jit(
        jax.value_and_grad(lambda parameters: mlm_loss(nnx.merge(graph, parameters), batch, keys, nsp=True))
    )(parameters)
    assert float(loss) == pytest.approx(5.229801177978516, rel=1e-6)
    total = sum(np.abs(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(gradients))
    assert total == pytest.approx(210.13887433926925, rel=1e-6)


def make_batch(length: int):
    """Returns a full row, one with padding, and one with three packed sequences, whose positions restart."""
    twelfths = [[1] * 12, [1] * 8 + [0] * 4, [1] * 3 + [2] * 6 + [3] * 2 + [0]]
    ids = np.repeat(twelfths, -(-length // 12), axis=1)[:, :length]
    batch = batches.make_batch(predictions=12, vocab_size=300, sequence_ids=ids)
    starts = [[np.flatnonzero(row == number)[0] for number in row] for row in ids]
    return {**batch, "positions": (np.arange(length) - np.array(starts)).astype(np.int32)}


def torch_loss(model, batch):
    """Returns the loss, and the hidden states [layers + 1, B, L, D], of each sequence alone."""
    torch, _ = require_torch()
    total, hidden = 0, np.zeros((model.config.num_hidden_layers + 1, *batch["input_ids"].shape, 64))
    for row, number in ((0, 1), (1, 1), (2, 1), (2, 2), (2, 3)):
        at = np.flatnonzero(batch["sequence_ids"][row] == number)
        alone = {"input_ids": batch["input_ids"][row : row + 1, at], "sequence_ids": np.ones((1, len(at)))}
        output = modernbert.torch_outputs(model, alone, output_hidden_states=True)
        hidden[:, row, at] = torch.cat(output.hidden_states).detach().numpy()
        inside = np.isin(batch["masked_positions"][row], at)
        logits = output.logits[0, batch["masked_positions"][row][inside] - at[0]]
        labels, weights = (torch.tensor(batch[name][row][inside]) for name in ("masked_ids", "masked_weights"))
        total += (weights * torch.nn.functional.cross_entropy(logits, labels.long(), reduction="none")).sum()
    return total / batch["masked_weights"].sum(), hidden


@pytest.mark.parametrize(
    ("length", "fields", "settings"),
    [
        (40, {}, {}),  # no multiple of the window: masked
        (96, {"global_attn_every_n_layers": 2, **BIASES}, {"scan_layers": False, "remat": "full"}),
        (512, {"local_attention": 64}, {"remat": "attention"}),
    ],
)
def test_hidden_states_loss_and_gradients(length: int, fields: dict, settings: dict, tmp_path: Path):
    model = modernbert.save_torch(tmp_path / "hf", **fields)
    source, batch = open_source(str(tmp_path / "hf")), make_batch(length)
    expected, expected_hidden = torch_loss(model, batch)
    expected.backward()

    graph, _, _ = abstract_parameters(source.bert_config, heads=source.heads, **settings)
    parameters, arrays, real = source.load_parameters(), jax.tree.map(jnp.asarray, batch), batch["sequence_ids"] > 0
    last, hidden = jax.jit(lambda parameters: nnx.merge(graph, parameters).encode(arrays, all_hidden_states=True))(
        parameters
    )
    np.testing.assert_array_equal(hidden[-1], last)
    for number, (ours, theirs) in enumerate(zip(hidden, expected_hidden, strict=True)):
        assert_relative(np.asarray(ours)[real], theirs[real], 1e-5, f"hidden state {number}")
    loss, gradients = jax.jit(jax.value_and_grad(lambda parameters: mlm_loss(nnx.merge(graph, parameters), arrays)))(
        parameters
    )
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    ours = state_dict(gradients, layout(source.bert_config, "ModernBertForMaskedLM", source.heads))
    theirs = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        if name.endswith("Wqkv.bias"):  # that of keys is zero but for rounding
            ours[name], gradient = (np.delete(bias.reshape(3, -1), 1, axis=0) for bias in (ours[name], gradient))
        assert_relative(ours[name], gradient, 1e-5, name)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_local_attention_equal_the_mask(causal: bool):
    config = BertConfig(**{**CONFIG.to_dict(), "is_decoder": causal})
    attention = SelfAttention(config, key=jax.random.key(0), stack=(1,))
    graph, state = nnx.split(attention)
    state = jax.tree.map(lambda leaf: leaf[0], state)
    ids = jnp.asarray(np.repeat([[1, 1, 2, 3, 3, 0], [1, 2, 2, 2, 2, 2]], 8, axis=1))
    positions = jnp.broadcast_to(jnp.arange(48), ids.shape)
    x, weights = jax.random.normal(jax.random.key(1), (2, *ids.shape, 64))
    blocks = attention.visibility(ids, positions, is_local=True)
    angles = rotary_angles(positions, 32, 10_000.0)
    masked = Visibility(attention_mask(ids, causal=causal, reach=8), 8, (angles, angles))
    assert blocks.mask.shape == (6, 16, 32)
    assert masked.mask.shape == (2, 48, 48)

    def context(state, x, visibility):
        y = nnx.merge(graph, state)(x, visibility, None)
        return (y * weights).sum(), y

    (_, got), got_gradients = jax.value_and_grad(context, argnums=(0, 1), has_aux=True)(state, x, blocks)
    (_, expected), gradients = jax.value_and_grad(context, argnums=(0, 1), has_aux=True)(state, x, masked)
    models.assert_close((got, got_gradients), (expected, gradients), rtol=1e-5, atol=1e-6)


def test_local_layers_cost_less_than_global_ones():
    batch = batches.make_device_batch(length=1024, rows=1)

    def cost(**fields: object) -> dict:
        graph, shapes, _ = abstract_parameters(
            BertConfig(**{**CONFIG.to_dict(), "local_attention": 128, **fields}), scan_layers=False
        )
        run = jax.jit(lambda parameters: nnx.merge(graph, parameters).encode(batch)[0])
        return run.lower(shapes).compile().cost_analysis()

    assert cost(global_attn_every_n_layers=4)["flops"] < 0.6 * cost(global_attn_every_n_layers=1)["flops"]


def test_each_dropout_has_its_place_and_rate(monkeypatch: pytest.MonkeyPatch):
    rates = {"embedding_dropout": 0.1, "attention_output_dropout": 0.2, "mlp_dropout": 0.3, "hidden_dropout_prob": 0.4}
    config = BertConfig(**{**CONFIG.to_dict(), **rates, "num_hidden_layers": 1, "global_attn_every_n_layers": 1})
    dropped = []
    monkeypatch.setattr(
        layers, "drop", lambda x, keep, rate: (dropped.append((x.shape[-1], rate)) if rate else None, x)[1]
    )
    graph, parameters = models.initialize(config)
    nnx.merge(graph, parameters).encode(batches.make_device_batch(), jax.random.key(0))
    assert dropped[:4] == [(64, 0.1), (64, 0.2), (80, 0.3), (64, 0.4)]


def test_new_weights_that_end_a_sublayer_are_smaller_by_depth():
    parameters = models.initialize(CONFIG)[1]
    layer = parameters["encoder"]["layers"]
    kernels = {**layer["attention"], **layer["feed_forward"], "head": parameters["mlm_head"]["kernel"]}
    deviations = {name: float(np.std(kernel)) for name, kernel in kernels.items()}
    assert deviations["up_kernel"] == pytest.approx(deviations["qkv_kernel"], rel=0.02)
    for name in ("output_kernel", "down_kernel", "head"):
        assert deviations[name] == pytest.approx(deviations["qkv_kernel"] / np.sqrt(2 * 4), rel=0.05)
