"""Against `transformers`' torch BERT on random weights: every hidden state, both losses, every gradient, 200 steps."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx
from support import batches, sources
from support.models import assert_relative
from support.torch_models import require_torch

from bert_jax.batch import HostBatch
from bert_jax.config import load_config
from bert_jax.config_keys import MeshKeys
from bert_jax.interop.weights import layout, state_dict
from bert_jax.model import abstract_parameters
from bert_jax.model.bert import HEADS
from bert_jax.parallel.mesh import make_mesh, put_batch
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.initialization import initialize_from
from bert_jax.training.objectives import divide, pretraining
from bert_jax.training.optimizer import learning_rate_schedule, make_optimizer
from bert_jax.training.train_step import describe_state, make_train_step

torch, transformers = require_torch()

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

PAPER = pretraining(nsp=True)


def both_models(folder: Path, vocabulary: list[str], **sizes: object):
    """(our checkpoint, torch's model) of the same random weights.

    They are small: where softmax saturates, the gradients of queries and keys are differences of equal numbers.
    """
    checkpoint = sources.write_checkpoint(folder / "large", vocabulary, **NO_DROPOUT, **sizes)
    parameters = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * 0.3 + (path[-1].key == "scale"), checkpoint.load_parameters()
    )
    sources.save_parameters(
        epath.Path(folder / "hf-checkpoint"), parameters, bert_config=checkpoint.bert_config,
        tokenizer=checkpoint.tokenizer, heads=HEADS,
    )  # fmt: skip
    sources.huggingface.export(open_checkpoint(str(folder / "hf-checkpoint")), str(folder / "hf"))
    model, info = transformers.BertForPreTraining.from_pretrained(
        folder / "hf", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return open_checkpoint(str(folder / "hf-checkpoint")), model


def make_batch(seed: int, vocab_size: int, rows: int, length: int, predictions: int) -> HostBatch:
    """Rows of every length from 3 on, and slots without weight.

    No [PAD], to whose embedding torch passes no gradient (`padding_idx`), which the original BERT does.
    """
    lengths = np.random.default_rng(seed).integers(3, length + 1, (rows, 1))
    lengths[0] = length
    batch = batches.make_batch(
        seed, rows=rows, predictions=predictions, vocab_size=vocab_size, sequence_ids=np.arange(length) < lengths
    )
    # Mostly 1: with as many of each the gradient of that head's bias is a difference of equal numbers.
    return {**batch, "next_sentence_labels": (np.arange(rows) >= rows // 3)[:, None].astype(np.int32)}


def torch_loss(model, batch: dict[str, np.ndarray]):
    """(loss, output): both cross entropies, the masked one a weighted mean over the batch."""
    tensors = {name: torch.tensor(entry).long() for name, entry in batch.items() if entry.dtype != np.float32}
    output = model(
        input_ids=tensors["input_ids"], token_type_ids=tensors["token_type_ids"],
        attention_mask=tensors["sequence_ids"], output_hidden_states=True,
    )  # fmt: skip
    positions = tensors["masked_positions"][..., None].expand(-1, -1, output.prediction_logits.shape[-1])
    logits = output.prediction_logits.gather(1, positions)
    costs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tensors["masked_ids"].flatten(), reduction="none")
    weights = torch.tensor(batch["masked_weights"]).flatten()
    nsp = torch.nn.functional.cross_entropy(output.seq_relationship_logits, tensors["next_sentence_labels"][:, 0])
    return (weights * costs).sum() / weights.sum() + nsp, output


SHAPES = [
    ({}, 4, 20, 5),
    pytest.param({"hidden_act": "gelu_new"}, 3, 64, 12, marks=pytest.mark.long),
    pytest.param(
        {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
        2,
        33,
        7,
        marks=pytest.mark.long,
    ),
    pytest.param(
        {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 8, "intermediate_size": 40},
        7,
        9,
        1,
        marks=pytest.mark.long,
    ),
    pytest.param({"num_hidden_layers": 12, "hidden_act": "gelu_new"}, 2, 16, 4, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("sizes", "rows", "length", "predictions"), SHAPES)
def test_hidden_states_losses_and_gradients(sizes, rows, length, predictions, vocabulary: list[str], tmp_path: Path):
    checkpoint, model = both_models(tmp_path, vocabulary, **sizes)
    batch = make_batch(0, checkpoint.bert_config.vocab_size, rows, length, predictions)
    expected_loss, output = torch_loss(model, batch)
    expected_loss.backward()

    graph, _, _ = abstract_parameters(checkpoint.bert_config)
    parameters, arrays = checkpoint.load_parameters(), jax.tree.map(jnp.asarray, batch)
    real = batch["sequence_ids"] > 0
    _, hidden = jax.jit(lambda parameters: nnx.merge(graph, parameters).encode(arrays, all_hidden_states=True))(
        parameters
    )
    for number, (ours, theirs) in enumerate(zip(hidden, output.hidden_states, strict=True)):
        assert_relative(np.asarray(ours)[real], theirs.detach().numpy()[real], 1e-5, f"hidden state {number}")

    def loss(parameters):
        means = divide(PAPER.sums(nnx.merge(graph, parameters), arrays, None), PAPER.denominators(arrays))
        return means["mlm_loss"] + means["nsp_loss"]

    got_loss, gradients = jax.jit(jax.value_and_grad(loss))(parameters)
    assert float(got_loss) == pytest.approx(expected_loss.item(), rel=1e-5)
    ours = state_dict(gradients, layout(checkpoint.bert_config, "BertForPreTraining", HEADS))
    theirs = {name: tensor.grad.numpy() for name, tensor in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    scale = max(np.abs(gradient).max() for gradient in theirs.values())
    for name, expected in theirs.items():
        if name.endswith("self.key.bias"):  # zero but for rounding: a shift of all scores does not move a softmax
            assert np.abs(ours[name]).max() < 1e-5 * scale
            continue
        assert_relative(ours[name], expected, 1e-5, name)


def test_bfloat16_stays_within_two_percent(vocabulary: list[str], tmp_path: Path):
    checkpoint, model = both_models(tmp_path, vocabulary)
    batch = make_batch(0, checkpoint.bert_config.vocab_size, 8, 40, 8)
    expected_loss, output = torch_loss(model, batch)
    graph, _, _ = abstract_parameters(checkpoint.bert_config, dtype=jnp.bfloat16)
    arrays, real = jax.tree.map(jnp.asarray, batch), batch["sequence_ids"] > 0

    def last_and_means(parameters):
        bert = nnx.merge(graph, parameters)
        return bert.encode(arrays)[0], divide(PAPER.sums(bert, arrays, None), PAPER.denominators(arrays))

    last, means = jax.jit(last_and_means)(checkpoint.load_parameters())
    assert_relative(np.asarray(last, np.float32)[real], output.hidden_states[-1].detach().numpy()[real], 0.02, "last")
    assert float(means["mlm_loss"] + means["nsp_loss"]) == pytest.approx(expected_loss.item(), rel=0.02)


class ReferenceOptimizer:
    """google-research/bert's AdamWeightDecayOptimizer behind a global clip, on torch parameters."""

    def __init__(self, model, peak: float, warmup: int, total: int):
        self.named, self.peak, self.warmup, self.total, self.t = list(model.named_parameters()), peak, warmup, total, 0
        self.m = [torch.zeros_like(p) for _, p in self.named]
        self.v = [torch.zeros_like(p) for _, p in self.named]

    @torch.no_grad()
    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_([p for _, p in self.named], 1.0)
        warm = self.t < self.warmup
        rate = self.peak * (self.t / self.warmup if warm else 1 - self.t / self.total)
        for (name, p), m, v in zip(self.named, self.m, self.v, strict=True):
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            update = m / (v.sqrt() + 1e-6)
            if "LayerNorm" not in name and "bias" not in name:
                update += 0.01 * p
            p -= rate * update
            p.grad = None
        self.t += 1


@pytest.mark.timeout(600)
@pytest.mark.long
def test_two_hundred_steps_side_by_side(vocabulary: list[str], tmp_path: Path):
    steps, peak, warmup = 200, 1e-3, 20
    checkpoint, model = both_models(tmp_path, vocabulary, hidden_act="gelu_new")
    reference = ReferenceOptimizer(model, peak, warmup, steps)
    mesh = make_mesh(MeshKeys(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    optimizer = make_optimizer(load_config("default").optimizer, abstract_parameters(checkpoint.bert_config)[2])
    spec = describe_state(mesh, checkpoint.bert_config, optimizer, seed=0)
    schedule = learning_rate_schedule(peak, warmup, steps)
    train_step = make_train_step(mesh, spec, optimizer, schedule, pretraining(nsp=True), seed=0)
    state = initialize_from(checkpoint, spec)
    losses = []
    for step in range(steps):
        batch = make_batch(step, checkpoint.bert_config.vocab_size, 8, 24, 6)
        # What can be learned in 200 steps: to say the token that is there.
        batch["masked_ids"] = np.take_along_axis(batch["input_ids"], batch["masked_positions"], axis=1)
        with jax.set_mesh(mesh):
            state, metrics = train_step(state, put_batch(mesh, batch))
        expected, _ = torch_loss(model, batch)
        expected.backward()
        reference.step()
        losses.append((float(metrics["loss"]), expected.item()))
    ours, theirs = np.array(losses).T
    assert np.abs(ours - theirs).max() < 1e-3
    assert ours[-20:].mean() < ours[:20].mean() - 1  # there was something to learn, and it was learned
