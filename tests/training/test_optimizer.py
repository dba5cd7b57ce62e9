import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import load_config
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.training.optimizer import decay_mask, learning_rate_schedule, make_optimizer


def reference_learning_rate(step: int, peak: float, warmup: int, total: int) -> float:
    """google-research/bert: a linear decay from step 0 to 0 at `total`, replaced by a linear warm-up below `warmup`."""
    return peak * step / warmup if step < warmup else peak * (1 - min(step, total) / total)


@pytest.mark.parametrize("step", [0, 1, 9_999, 10_000, 10_001, 500_000, 999_999, 1_000_000])
def test_schedule_is_the_references(step):
    schedule = learning_rate_schedule(1e-4, 10_000, 1_000_000)
    expected = reference_learning_rate(step, 1e-4, 10_000, 1_000_000)
    np.testing.assert_allclose(float(schedule(jnp.asarray(step))), expected, rtol=2e-5, atol=1e-11)


def test_schedule_steps_down_at_the_end_of_the_warm_up():
    schedule = learning_rate_schedule(1e-4, 10_000, 1_000_000)
    assert float(schedule(9_999)) == pytest.approx(9.999e-5, rel=1e-6)
    assert float(schedule(10_000)) == pytest.approx(9.9e-5, rel=1e-6)
    assert float(learning_rate_schedule(1e-4, 0, 10)(0)) == pytest.approx(1e-4)


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_fifty_updates_against_plain_numpy(bias_correction, clip):
    rng = np.random.default_rng(0)
    config = load_config(
        "default",
        [("optimizer.bias_correction", str(bias_correction)), ("optimizer.grad_clip_norm", str(clip))],
    ).optimizer
    start = {"dense": {"kernel": rng.standard_normal((4, 3)), "bias": rng.standard_normal(3)},
             "norm": {"scale": rng.standard_normal(3)}}  # fmt: skip
    parameters = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), start)
    optimizer = make_optimizer(config)
    state = optimizer.init(parameters)
    p = {("dense", "kernel"): start["dense"]["kernel"], ("dense", "bias"): start["dense"]["bias"],
         ("norm", "scale"): start["norm"]["scale"]}  # fmt: skip
    m = {name: np.zeros_like(value) for name, value in p.items()}
    v = {name: np.zeros_like(value) for name, value in p.items()}
    for step in range(1, 51):
        gradients = {name: rng.standard_normal(value.shape) for name, value in p.items()}
        tree = {
            "dense": {"kernel": gradients["dense", "kernel"], "bias": gradients["dense", "bias"]},
            "norm": {"scale": gradients["norm", "scale"]},
        }
        direction, state = optimizer.update(jax.tree.map(jnp.asarray, tree), state, parameters)
        parameters = jax.tree.map(lambda a, d: a - 0.01 * d, parameters, direction)
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        scale = clip / max(norm, clip) if clip else 1.0
        for name, g in gradients.items():
            m[name] = 0.9 * m[name] + 0.1 * g * scale
            v[name] = 0.999 * v[name] + 0.001 * (g * scale) ** 2
            m_hat = m[name] / (1 - 0.9**step) if bias_correction else m[name]
            v_hat = v[name] / (1 - 0.999**step) if bias_correction else v[name]
            decay = 0.01 if name == ("dense", "kernel") else 0.0
            p[name] = p[name] - 0.01 * (m_hat / (np.sqrt(v_hat) + 1e-6) + decay * p[name])
    for (module, leaf), expected in p.items():
        np.testing.assert_allclose(parameters[module][leaf], expected, rtol=2e-4, atol=2e-5)


def test_what_decays_is_decided_by_name():
    _, shapes, _ = abstract_parameters(BertConfig())
    mask = decay_mask(shapes)
    decaying = {jax.tree_util.keystr(path) for path, decays in jax.tree_util.tree_leaves_with_path(mask) if decays}
    assert decaying == {
        "['embeddings']['word']", "['embeddings']['position']", "['embeddings']['token_type']",
        "['encoder']['layers']['attention']['qkv_kernel']", "['encoder']['layers']['attention']['output_kernel']",
        "['encoder']['layers']['feed_forward']['up_kernel']", "['encoder']['layers']['feed_forward']['down_kernel']",
        "['pooler']['kernel']", "['mlm_head']['kernel']", "['nsp_head']['kernel']",
    }  # fmt: skip
