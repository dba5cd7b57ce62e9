import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core
from support import models
from support.batches import make_device_batch
from support.models import initialize

from bert_jax.config import load_config
from bert_jax.errors import InputError
from bert_jax.model import BertConfig, abstract_parameters, parameter_count
from bert_jax.model.layers import dropout_mask
from bert_jax.parallel.mesh import abstract_mesh
from bert_jax.sections import to_dict
from bert_jax.training.pretrain import plan_state

SMALL = dataclasses.replace(models.SMALL, vocab_size=100, num_hidden_layers=3)


def model_of(config: BertConfig, **settings: object):
    return nnx.merge(*initialize(config, **settings))


@nnx.jit
def call(model, *arguments):
    return model(*arguments)


RELEASED = [(layers, size, size // 64) for layers in (2, 4, 6, 8, 10, 12) for size in (128, 256, 512, 768)]
TABLE_6 = [(3, 768, 12), (6, 768, 3), (6, 768, 12), (12, 768, 12), (12, 1024, 16), (24, 1024, 16)]


@pytest.mark.parametrize(("layers", "size", "heads"), [*RELEASED, *TABLE_6])
def test_any_size_by_argument_has_the_papers_parameters(layers, size, heads):
    named = to_dict(load_config(f"bert:L{layers}_H{size}_A{heads}").model)
    if heads == size // 64:
        assert to_dict(load_config(f"bert:L{layers}_H{size}").model) == named
    config = BertConfig(**{**named, "vocab_size": 30_522})
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (layers, size, heads)
    embeddings = (30_522 + 512 + 2) * size + 2 * size
    layer = 4 * (size * size + size) + 2 * 4 * size * size + 4 * size + size + 2 * 2 * size
    heads_ = 2 * (size * size + size) + 2 * size + 30_522 + 2 * size + 2  # pooler, masked-LM, next sentence
    assert parameter_count(config) == embeddings + layers * layer + heads_


@pytest.mark.parametrize("size", ["4_256", "L4_H100", "L4H256"])
def test_invalid_size_argument_is_refused(size):
    with pytest.raises(InputError, match=f"{size}\\b.*L4_H"):
        load_config(f"bert:{size}")


def test_vocabulary_padding_is_zero_and_never_predicted():
    model = model_of(SMALL)
    assert model.embeddings.word[...].shape == (128, 32)
    assert not np.any(model.embeddings.word[...][100:])
    logits, _ = call(model, make_device_batch())
    assert logits.shape == (3, 4, 128)
    assert np.all(np.isneginf(logits[..., 100:]))
    np.testing.assert_allclose(jax.nn.softmax(logits)[..., :100].sum(-1), 1.0, rtol=1e-6)


def test_vocabulary_padding_gets_no_gradient():
    graph, parameters = initialize(SMALL)
    batch = make_device_batch()

    def loss(parameters):
        logits, _ = nnx.merge(graph, parameters)(batch)
        return -jax.nn.log_softmax(logits)[..., 7].sum()

    gradient = jax.jit(jax.grad(loss))(parameters)
    assert np.all(np.isfinite(gradient["embeddings"]["word"]))
    assert not np.any(gradient["embeddings"]["word"][100:])
    assert not np.any(gradient["mlm_head"]["output_bias"][100:])
    assert np.any(gradient["embeddings"]["word"][:100])


def test_initial_values_of_every_parameter():
    config = dataclasses.replace(SMALL, hidden_size=64, intermediate_size=256, initializer_range=0.5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(initialize(config)[1]):
        name, value = jax.tree_util.keystr(path), np.asarray(leaf)
        if "bias" in name:
            assert not value.any(), name
        elif "scale" in name:
            assert (value == 1).all(), name
        else:
            value = value[:100] if "word" in name else value
            assert np.abs(value).max() <= 1 + 1e-6, name
            assert value.std() == pytest.approx(0.5 * 0.8796, rel=5 / np.sqrt(2 * value.size)), name


def test_padding_does_not_reach_real_tokens():
    model = model_of(SMALL)
    kernel = model.encoder.layers.attention.qkv_kernel
    kernel[...] = 50 * kernel[...]  # scores so large that a mask of, say, -10 would not hide them
    batch = make_device_batch()
    padding = batch["sequence_ids"] == 0
    assert padding.any()
    changed = {**batch, "input_ids": jnp.where(padding, 42, batch["input_ids"])}
    before, after = call(model, batch), call(model, changed)
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_array_equal(before[1], after[1])


@functools.cache
def value_and_gradient(remat: str = "none", scan_layers: bool = True) -> tuple[jax.Array, dict]:
    batch, key = make_device_batch(), jax.random.key(3)
    _, parameters = initialize(SMALL)
    graph, _, _ = abstract_parameters(SMALL, remat=remat, scan_layers=scan_layers)

    def loss(parameters):
        logits, nsp = nnx.merge(graph, parameters)(batch, key)
        return jax.nn.log_softmax(logits)[..., 7].sum() + nsp[..., 0].sum()

    return jax.jit(jax.value_and_grad(loss))(parameters)


@pytest.mark.parametrize(
    ("platform", "layers", "setting", "scans"),
    [("cpu", 12, "auto", False), ("cpu", 24, "auto", True), ("tpu", 24, "auto", False), ("tpu", 48, "auto", True),
     ("gpu", 12, "auto", True), ("cpu", 12, True, True), ("tpu", 12, False, False)],
)  # fmt: skip
def test_few_layers_are_unrolled_on_a_cpu_and_a_tpu(platform, layers, setting, scans):
    model = BertConfig(**{**dataclasses.asdict(SMALL), "num_hidden_layers": layers})
    config = load_config("default", {"scan_layers": setting})
    _, spec = plan_state(abstract_mesh(config.mesh, devices=1), config, model, platform)
    assert nnx.merge(spec.graph, spec.abstract.parameters).encoder.scan_layers == scans


@pytest.mark.parametrize(
    ("platform", "setting", "sharded"),
    [("tpu", "auto", True), ("gpu", "auto", False), ("gpu", True, True), ("tpu", False, False)],
)
def test_the_state_is_sharded_along_data_on_a_tpu(platform, setting, sharded):
    config = load_config("default", {"mesh.zero1": setting})
    _, spec = plan_state(abstract_mesh(config.mesh, devices=4), config, SMALL, platform)
    assert ("data" in spec.shardings.parameters["pooler"]["kernel"].spec) == sharded
    assert "data" not in spec.gathered["pooler"]["kernel"].spec


@pytest.mark.parametrize(
    ("remat", "scan_layers"),
    [
        ("attention", True),
        ("none", False),
        *(pytest.param(remat, True, marks=pytest.mark.long) for remat in ("dots", "full")),
        pytest.param("full", False, marks=pytest.mark.long),
    ],
)
def test_remat_and_scan_change_nothing_but_the_program(remat, scan_layers):
    expected, gradient = value_and_gradient()
    got, other = value_and_gradient(remat, scan_layers)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    models.assert_close(gradient, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("remat", "kept"), [("none", {"square", "inner"}), ("attention", {"inner"}), ("dots", {"inner"}), ("full", set())]
)
def test_remat_keeps_no_more_than_it_says(remat, kept):
    batch, rows, length = make_device_batch(rows=2, length=24), 2, 24
    graph, parameters = initialize(SMALL, remat=remat)

    def backward():
        return jax.vjp(lambda p: nnx.merge(graph, p)(batch, jax.random.key(3))[0], parameters)[1]

    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(backward))]
    of_layers = [shape[1:] for shape in shapes if shape[:1] == (SMALL.num_hidden_layers,)]
    found = {"square" for shape in of_layers if shape[-2:] == (length, length)}
    # By rows and tokens, or by the tokens of all rows; never both.
    inner = [shape for shape in of_layers if shape[-1:] == (SMALL.intermediate_size,) and len(shape) > 2]
    inner += [shape for shape in of_layers if shape == (rows * length, SMALL.intermediate_size)]
    assert len(inner) <= 1
    assert found | {"inner" for _ in inner} == kept
    assert (batch["input_ids"].shape[0], length, SMALL.hidden_size) in of_layers  # each layer's input, always


def products(jaxpr: core.Jaxpr) -> int:
    """Number of matrix products in a program, loops counted once."""
    found = sum(equation.primitive.name == "dot_general" for equation in jaxpr.eqns)
    for equation in jaxpr.eqns:
        leaves = jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr))
        found += sum(products(getattr(x, "jaxpr", x)) for x in leaves if isinstance(x, core.Jaxpr | core.ClosedJaxpr))
    return found


@pytest.mark.parametrize("scan_layers", [True, False])
def test_gathered_layers_are_gathered_again_and_recompute_no_product(scan_layers):
    """Without a name an activation would be recomputed, by products if it comes from one; see `REMAT_POLICIES`."""
    batch = make_device_batch(rows=2, length=24)
    graph, parameters = initialize(SMALL, scan_layers=scan_layers)

    def gather_layer(layer: dict) -> dict:
        return jax.tree.map(lambda x: 2 * x, layer)

    def loss(parameters: dict, **settings: object) -> jax.Array:
        return nnx.merge(graph, parameters)(batch, jax.random.key(3), **settings)[0][..., 7].sum()

    gathered = functools.partial(loss, gather_layer=gather_layer)
    counts = [products(jax.make_jaxpr(jax.grad(one))(parameters).jaxpr) for one in (loss, gathered)]
    assert counts[0] == counts[1] > 0
    kernel = parameters["encoder"]["layers"]["feed_forward"]["up_kernel"]
    saved = jax.tree.leaves(jax.jit(lambda p: jax.vjp(gathered, p)[1])(parameters))
    kept = [leaf for leaf in saved if leaf.shape == kernel.shape or leaf.shape == kernel.shape[1:]]
    assert kept
    assert all(np.array_equal(leaf, kernel) for leaf in kept)  # as the step holds it, not as it is gathered


def test_dropout_is_in_four_places_each_with_its_rate_and_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch):
    drawn = []

    def spy(shape, rate, key):
        drawn.append((shape, rate, jax.random.key_data(key).tobytes()))
        return jnp.zeros(shape, bool) if silent == len(drawn) else real(shape, rate, key)

    real, silent = dropout_mask, 0
    for module in ("layers", "attention"):
        monkeypatch.setattr(f"bert_jax.model.{module}.dropout_mask", spy)
    config = dataclasses.replace(SMALL, num_hidden_layers=2, hidden_dropout_prob=0.25, attention_probs_dropout_prob=0.5)
    model = nnx.merge(*initialize(config))
    ones = jnp.ones((2, 8), jnp.int32)
    batch = {"input_ids": ones, "token_type_ids": ones, "positions": ones, "sequence_ids": ones}
    with jax.disable_jit():  # so that every layer is run, and not one traced
        last, hidden = model.encode(batch, jax.random.key(0), all_hidden_states=True)
        whole, layer = (2, 8, 32), [((2, 4, 8, 8), 0.5), ((2, 8, 32), 0.25), ((2, 8, 32), 0.25)]
        assert [place[:2] for place in drawn] == [(whole, 0.25), *layer * 2]
        assert len({key for *_, key in drawn}) == len(drawn)
        assert abs(np.mean(hidden[0] == 0) - 0.25) < 0.1  # after the LayerNorm, not before it
        for silent in range(1, 5):  # what each gives is what is gone on with
            drawn.clear()
            assert not np.array_equal(model.encode(batch, jax.random.key(0))[0], last), silent


def test_the_softmax_of_attention_is_of_fp32_scores(monkeypatch: pytest.MonkeyPatch):
    seen, real = [], jax.nn.softmax
    monkeypatch.setattr(jax.nn, "softmax", lambda x, axis=-1: seen.append(x.dtype) or real(x, axis=axis))
    hidden, _ = model_of(SMALL, dtype=jnp.bfloat16).encode(make_device_batch())
    assert hidden.dtype == jnp.bfloat16
    assert set(seen) == {jnp.dtype("float32")}


def test_computation_in_bfloat16_stays_close_and_gives_fp32_logits():
    batch = make_device_batch()
    _, parameters = initialize(SMALL)
    outputs = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        graph, _, _ = abstract_parameters(SMALL, dtype=dtype)
        outputs[dtype] = call(nnx.merge(graph, parameters), batch)
    logits, nsp = outputs[jnp.bfloat16]
    assert logits.dtype == nsp.dtype == jnp.float32
    np.testing.assert_allclose(logits[..., :100], outputs[jnp.float32][0][..., :100], atol=0.05)
    assert not np.array_equal(logits, outputs[jnp.float32][0])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_attention_heads": 5}, r"hidden_size=32\b.*num_attention_heads=5"),
        ({"hidden_act": "swish"}, "hidden_act=swish: .*gelu_new"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers=0: .*\b1\b"),
        ({"hidden_dropout_prob": 1.0}, r"hidden_dropout_prob=1\.0: "),
        ({"hidden_size": 32.5}, r"hidden_size=32\.5: .*\bint\b"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps=nan: "),
        ({"layer_norm_eps": 0.0}, r"layer_norm_eps=0\.0: .*\b0\b"),
        ({"initializer_range": -0.02}, r"initializer_range=-0\.02: .*\b0\b"),
        ({"is_decoder": "no"}, "is_decoder=no: .*true or false"),
    ],
)
def test_invalid_sizes_are_refused(sizes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SMALL, **sizes)
