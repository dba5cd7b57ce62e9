import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.models import SMALL, initialize
from support.torch_models import require_torch

from bert_jax.config import load_config
from bert_jax.config_keys import OptimizerKeys
from bert_jax.model import abstract_parameters
from bert_jax.model.layers import ParameterInfo
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.training.optimizer import (
    clip_by_norm,
    count_steps,
    decay_mask,
    learning_rate_schedule,
    leave_untrained,
    make_optimizer,
)


def reference_learning_rate(step: int, peak: float, warmup: int, total: int, power: float = 1.0) -> float:
    """google-research/bert: a decay from step 0 to 0 at `total`, replaced by a linear warm-up below `warmup`."""
    return peak * step / warmup if step < warmup else peak * (1 - min(step, total) / total) ** power


@pytest.mark.parametrize(
    ("peak", "warmup", "total", "power"),
    [(1e-4, 10_000, 1_000_000, 1.0), (6e-3, 2_000, 7_038, 0.5), (4e-3, 200, 1_563, 0.5)],
)
def test_schedule_is_the_references(peak, warmup, total, power):
    recipe = OptimizerKeys(schedule="linear" if power == 1 else "polynomial", decay_power=power)
    schedule = learning_rate_schedule(peak, warmup, total, recipe)
    shifted = learning_rate_schedule(peak, warmup, total, recipe, start=123)
    for step in (0, 1, warmup - 1, warmup, warmup + 1, total // 2, total - 1, total, total + 7):
        expected = reference_learning_rate(step, peak, warmup, total, power)
        assert abs(float(schedule(jnp.asarray(step))) - expected) < 1e-9, step
        assert abs(float(shifted(jnp.asarray(step + 123))) - expected) < 1e-9, step


WARM_UP = {0: 0.0, 1: 0.25, 3: 0.75}  # of 4 steps, as shares of the peak


@pytest.mark.parametrize(
    ("keys", "warmup", "expected"),
    [
        ({"schedule": "linear"}, 4, {**WARM_UP, 4: 16 / 20, 5: 15 / 20, 19: 1 / 20, 20: 0, 25: 0}),
        ({"schedule": "polynomial", "decay_power": 2.0}, 4, {**WARM_UP, 4: 0.64, 5: 0.5625, 19: 0.0025, 20: 0, 25: 0}),
        ({"schedule": "constant"}, 4, {**WARM_UP, 4: 1, 5: 1, 19: 1, 20: 1, 25: 1}),
        # cos(pi / 4) is sqrt(1/2): x = 1/4, 1/2 and 3/4 of the 16 steps after the warm-up
        ({"schedule": "cosine"}, 4, {**WARM_UP, 4: 1, 8: (1 + 0.5**0.5) / 2, 12: 0.5, 16: (1 - 0.5**0.5) / 2, 20: 0}),
        ({"schedule": "wsd", "decay_steps": 4}, 4,
         {**WARM_UP, 4: 1, 5: 1, 15: 1, 16: 1, 17: 0.5, 18: 1 - 0.5**0.5, 19: 1 - 0.75**0.5, 20: 0, 25: 0}),
        ({"schedule": "wsd", "decay_steps": 4, "decay_form": "linear"}, 4,
         {**WARM_UP, 4: 1, 15: 1, 16: 1, 17: 0.75, 18: 0.5, 19: 0.25, 20: 0, 25: 0}),
        ({"schedule": "wsd", "decay_steps": 0.21}, 0.24, {**WARM_UP, 4: 1, 16: 1, 17: 0.5, 20: 0}),  # 4.2 and 4.8 steps
        ({"schedule": "wsd", "decay_steps": 20}, 0, {0: 1, 5: 0.5, 20: 0}),  # a decay alone
    ],
)  # fmt: skip
def test_rates_at_the_boundaries_of_each_schedule(keys, warmup, expected):
    for start in (0, 100):
        schedule = learning_rate_schedule(2.0, warmup, 20, OptimizerKeys(**keys), start=start)
        found = {step: float(jax.jit(lambda step, s: s(step))(jnp.int32(start + step), schedule)) for step in expected}
        assert found == pytest.approx({step: 2 * share for step, share in expected.items()}, rel=1e-6, abs=1e-7)


def test_shares_of_steps_are_exact():
    """Their binary products are a little less: 0.29 * 100 is 28.999999999999996."""
    for total in (100, 10_000, 100_000):
        steps = [count_steps(share / 100, total) for share in range(100)]
        assert steps == [share * total // 100 for share in range(100)]


class NumpyOptimizer:
    """AdamW, LAMB and StableAdamW in float64 on a plain dict of the paper's tensors, one step at a time.

    The formulas are those of google-research/bert's optimization.py, of both stages of NVIDIA's LAMB kernel, and of
    algorithm 2 of Wortsman et al. 2023, whose betas are corrected instead of the moments.
    """

    def __init__(self, parameters, name, bias_correction, clip, decay=0.01):
        self.p = {key: np.array(value, np.float64) for key, value in parameters.items()}
        self.m = {key: np.zeros_like(value) for key, value in self.p.items()}
        self.v = {key: np.zeros_like(value) for key, value in self.p.items()}
        self.name, self.bias_correction, self.clip, self.decay, self.t = name, bias_correction, clip, decay, 0
        self.limited = set()

    def step(self, gradients, learning_rate):
        self.t += 1
        norm = np.sqrt(sum((np.float64(g) ** 2).sum() for g in gradients.values()))
        for key, p in self.p.items():
            g = np.float64(gradients[key])
            if self.clip and norm > self.clip:
                g = g / (norm / self.clip)
            b1, b2 = 0.9, 0.999
            if self.name == "stable_adamw":
                b1, b2 = (b * (1 - b ** (self.t - 1)) / (1 - b**self.t) for b in (b1, b2))
            self.m[key] = b1 * self.m[key] + (1 - b1) * g
            self.v[key] = b2 * self.v[key] + (1 - b2) * g * g
            m, v = self.m[key], self.v[key]
            if self.bias_correction:
                m, v = m / (1 - 0.9**self.t), v / (1 - 0.999**self.t)
            u = m / (np.sqrt(v) + 1e-6)
            decays = not key.endswith(("bias", "scale"))
            if decays:
                u = u + self.decay * p
            ratio = 1.0
            if self.name == "lamb" and decays:
                norm_p, norm_u = np.linalg.norm(p), np.linalg.norm(u)
                ratio = norm_p / norm_u if norm_p > 0 and norm_u > 0 else 1.0
            if self.name == "stable_adamw":
                rms = np.sqrt(np.mean(g * g / np.maximum(v, 1e-12)))
                self.limited.add(rms > 1)
                ratio = 1 / max(1, rms)
            self.p[key] = p - learning_rate * ratio * u


def papers_tensors(tree):
    """The parameters one by one as the paper has them: layers apart, and query, key and value apart."""
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name, leaf = jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(leaf)
        if "/layers/" not in name:
            tensors[name] = leaf
            continue
        for number, of_layer in enumerate(leaf):
            if "/qkv_kernel" in name:
                tensors |= {f"{number}/{name}/{i}/kernel": of_layer[:, i] for i in range(3)}
            elif "/qkv_bias" in name:
                tensors |= {f"{number}/{name}/{i}/bias": of_layer[i] for i in range(3)}
            else:
                tensors[f"{number}/{name}"] = of_layer
    return tensors


def updated(optimizer, parameters, reference, steps: int):
    """Parameters and state after random gradients, with a decaying rate; `reference` takes the same steps."""
    state, update, rng = optimizer.init(parameters), jax.jit(optimizer.update), np.random.default_rng(0)
    for step in range(steps):
        scale = 10.0 ** rng.uniform(-4, 0)  # now above the clip, now below
        gradients = jax.tree.map(
            lambda leaf, scale=scale: np.float32(scale * rng.standard_normal(leaf.shape)), parameters
        )
        learning_rate = 1e-3 * (1 - step / steps)
        direction, state = update(gradients, state, parameters)
        parameters = jax.tree.map(lambda p, d, lr=learning_rate: p - lr * d, parameters, direction)
        reference.step(papers_tensors(gradients), learning_rate)
    return parameters, state


@pytest.mark.parametrize(
    ("name", "bias_correction", "clip"),
    [
        ("adamw", False, 1.0), ("lamb", True, 1.0), ("stable_adamw", False, 1.0), ("stable_adamw", False, 0.0),
        pytest.param("adamw", True, 1.0, marks=pytest.mark.long),
        *(pytest.param(name, False, 0.0, marks=pytest.mark.long) for name in ("adamw", "lamb")),
    ],
)  # fmt: skip
def test_a_hundred_updates_against_plain_numpy(name, bias_correction, clip):
    overrides = {"name": name, "bias_correction": bias_correction, "grad_clip_norm": clip}
    config = load_config("default", [(f"optimizer.{key}", str(value)) for key, value in overrides.items()]).optimizer
    _, parameters = initialize(SMALL)
    _, _, info = abstract_parameters(SMALL)
    optimizer = make_optimizer(config, info)
    reference = NumpyOptimizer(papers_tensors(parameters), name, bias_correction, clip)
    parameters, _ = updated(optimizer, parameters, reference, steps=100)
    got = papers_tensors(parameters)
    assert got.keys() == reference.p.keys()
    for key, expected in reference.p.items():
        np.testing.assert_allclose(got[key], expected, rtol=1e-5, atol=1e-6, err_msg=key)
    assert reference.limited == ({False, True} if name == "stable_adamw" else set())


class TorchMuon:
    """Muon and AdamW of torch on the paper's tensors, behind a global clip."""

    def __init__(self, torch, parameters):
        self.torch = torch
        tensors = {key: torch.tensor(self.as_matrix(key, value)) for key, value in parameters.items()}
        self.p = {key: torch.nn.Parameter(tensor) for key, tensor in tensors.items()}
        groups = {kind: [self.p[key] for key in self.p if self.kind(key) == kind] for kind in ("muon", "decay", "none")}
        self.optimizers = [
            torch.optim.Muon(groups["muon"], weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups["decay"], weight_decay=0.01, eps=1e-6),
            torch.optim.AdamW(groups["none"], weight_decay=0.0, eps=1e-6),
        ]

    @staticmethod
    def kind(key):
        return "none" if key.endswith(("bias", "scale")) else "muon" if "/layers/" in key else "decay"

    def as_matrix(self, key, value):
        """Heads and their units are one axis: the first of an output, else the last."""
        if self.kind(key) != "muon":
            return value
        return value.reshape(-1, value.shape[-1]) if "output_kernel" in key else value.reshape(value.shape[0], -1)

    def step(self, gradients, learning_rate):
        for key, p in self.p.items():
            p.grad = self.torch.tensor(self.as_matrix(key, gradients[key]))
        self.torch.nn.utils.clip_grad_norm_(self.p.values(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()


@pytest.mark.parametrize("orthogonalized_in", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_fifty_updates_of_muon_against_torch(orthogonalized_in, monkeypatch):
    """Torch orthogonalizes in bfloat16, with errors of half a percent; without its cast it is held to those of fp32."""
    torch, _ = require_torch()
    if orthogonalized_in == "float32":
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    config = load_config("default", {"optimizer.name": "muon", "optimizer.bias_correction": True}).optimizer
    _, parameters = initialize(SMALL)
    optimizer = make_optimizer(config, abstract_parameters(SMALL)[2])
    first = papers_tensors(parameters)
    reference = TorchMuon(torch, first)
    parameters, state = updated(optimizer, parameters, reference, steps=50)
    for key, found in papers_tensors(parameters).items():
        expected = reference.p[key].detach().numpy().reshape(found.shape)
        if orthogonalized_in == "float32" or reference.kind(key) != "muon":
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=key)
        else:
            assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected - first[key]), key
    assert state[1].nu["encoder"]["layers"]["feed_forward"]["up_kernel"].shape == ()  # a second moment that is not kept


def test_trust_ratio_is_per_tensor_and_layer():
    """Layers whose weights differ a thousandfold: each moves by the same share of itself."""
    config = load_config("default", [("optimizer.name", "lamb"), ("optimizer.weight_decay", "0")]).optimizer
    _, parameters = initialize(SMALL)
    kernel = parameters["encoder"]["layers"]["attention"]["qkv_kernel"]
    sizes = 10.0 ** jnp.arange(6).reshape(2, 1, 3, 1, 1)
    parameters["encoder"]["layers"]["attention"]["qkv_kernel"] = kernel * sizes
    optimizer = make_optimizer(config, abstract_parameters(SMALL)[2])
    rng = np.random.default_rng(1)
    gradients = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), parameters)
    direction, _ = jax.jit(optimizer.update)(gradients, jax.jit(optimizer.init)(parameters), parameters)
    moved, of = papers_tensors(direction), papers_tensors(parameters)
    for key in of:
        if key.endswith(("bias", "scale")):
            continue
        assert np.linalg.norm(moved[key]) == pytest.approx(np.linalg.norm(of[key]), rel=1e-5), key


def test_zero_tensors_and_zero_gradients_have_trust_ratio_1():
    config = load_config("default", [("optimizer.name", "lamb"), ("optimizer.weight_decay", "0")]).optimizer
    optimizer = make_optimizer(config, {"a": ParameterInfo((None,)), "b": ParameterInfo((None,))})
    parameters = {"a": jnp.zeros(3), "b": jnp.ones(3)}
    direction, _ = optimizer.update({"a": jnp.ones(3), "b": jnp.zeros(3)}, optimizer.init(parameters), parameters)
    assert np.isfinite(direction["a"]).all()
    assert (direction["a"] > 0).all()
    assert (direction["b"] == 0).all()


CAST_AND_DECAYED = {
    "encoder/layers/attention/output_kernel", "encoder/layers/attention/qkv_kernel",
    "encoder/layers/feed_forward/down_kernel", "encoder/layers/feed_forward/up_kernel",
}  # fmt: skip
DECAYED = {
    "bilstm/above/backward/input_kernel", "bilstm/above/backward/state_kernel", "bilstm/above/forward/input_kernel",
    "bilstm/above/forward/state_kernel", "bilstm/backward/input_kernel", "bilstm/backward/state_kernel",
    "bilstm/forward/input_kernel", "bilstm/forward/state_kernel", "embeddings/position", "embeddings/token_type",
    "embeddings/word", "mlm_head/kernel", "nsp_head/kernel", "output/kernel", "pooler/kernel",
}  # fmt: skip
NOT_DECAYED = {
    "bilstm/above/backward/bias", "bilstm/above/forward/bias", "bilstm/backward/bias", "bilstm/forward/bias",
    "embeddings/norm/bias", "embeddings/norm/scale", "encoder/layers/attention/output_bias",
    "encoder/layers/attention/qkv_bias", "encoder/layers/attention_norm/bias", "encoder/layers/attention_norm/scale",
    "encoder/layers/feed_forward/down_bias", "encoder/layers/feed_forward/up_bias",
    "encoder/layers/feed_forward_norm/bias", "encoder/layers/feed_forward_norm/scale", "mix/scale", "mix/weights",
    "mlm_head/bias", "mlm_head/norm/bias", "mlm_head/norm/scale", "mlm_head/output_bias", "nsp_head/bias",
    "output/bias", "pooler/bias",
}  # fmt: skip
HEADS = [
    TaskHead("classify", 3), TaskHead("regress", 1), TaskHead("choose", 4), TaskHead("span", 2), TaskHead("tag", 5),
    TaskHead("tag", 5, bilstm=8, bilstm_layers=2, features="sum_all"), TaskHead("tag", 5, features="concat_last_four"),
]  # fmt: skip


def test_weight_decay_and_cast_of_every_parameter_of_bert_and_of_the_task_heads():
    found = {}
    for settings in [{}, *({"build": BertForTask, "head": head} for head in HEADS)]:
        _, _, tree = abstract_parameters(SMALL, **settings)
        for path, decays in jax.tree_util.tree_leaves_with_path(decay_mask(tree)):
            name, info = jax.tree_util.keystr(path, simple=True, separator="/"), tree
            for entry in path:
                info = info[entry.key]
            assert found.setdefault(name, (decays, info.compute_cast)) == (decays, info.compute_cast), name
    assert {name for name, rules in found.items() if rules == (True, True)} == CAST_AND_DECAYED
    assert {name for name, rules in found.items() if rules == (True, False)} == DECAYED
    assert {name for name, rules in found.items() if rules == (False, False)} == NOT_DECAYED


def test_untrained_parts_keep_their_values_and_moments():
    _, parameters = initialize(SMALL)
    plain = make_optimizer(
        load_config("default", [("optimizer.name", "lamb")]).optimizer, abstract_parameters(SMALL)[2]
    )
    gradients = jax.tree.map(jnp.ones_like, parameters)
    _, state = jax.jit(plain.update)(gradients, plain.init(parameters), parameters)
    expected, updated = jax.jit(plain.update)(gradients, state, parameters)
    found, kept = jax.jit(leave_untrained(plain, ("pooler",)).update)(gradients, state, parameters)
    assert not any(leaf.any() for leaf in jax.tree.leaves(found.pop("pooler")))
    assert all(leaf.any() for leaf in jax.tree.leaves(expected.pop("pooler")))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    before, after, trained = state[1], kept[1], updated[1]
    for moments in ("mu", "nu"):
        old, new, all_trained = (getattr(link, moments) for link in (before, after, trained))
        jax.tree.map(np.testing.assert_array_equal, new, {**all_trained, "pooler": old["pooler"]})
        assert (all_trained["pooler"]["kernel"] != old["pooler"]["kernel"]).any()
    assert after.updates == trained.updates == 2


def test_clipping_to_a_norm_is_exact_for_arrays_of_millions():
    """A sum of squares in the order of the elements would lose a hundredth of it."""
    gradients = np.random.default_rng(0).standard_normal((8_192, 1_024), np.float32)
    clipped, _ = jax.jit(clip_by_norm(1.5).update)({"a": gradients}, optax.EmptyState())
    norm = np.sqrt(np.square(np.asarray(clipped["a"], np.float64)).sum())
    np.testing.assert_allclose(norm, 1.5, rtol=1e-5)
