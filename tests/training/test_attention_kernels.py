"""Attention kernels in a run: refused settings, the step on a mesh, and use of the checkpoint without them."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax._src.cudnn import fused_attention_stablehlo
from support import batches, helpers, models

from bert_jax.batch import HostBatch
from bert_jax.config import load_config
from bert_jax.config_keys import MeshKeys
from bert_jax.errors import InputError
from bert_jax.inference import pretrained
from bert_jax.inference.features import extract
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.attention import cudnn_attention
from bert_jax.model.pallas_attention import pallas_attention
from bert_jax.model.workarounds import _on_every_axis
from bert_jax.parallel.mesh import make_mesh, put_batch
from bert_jax.sections import to_dict
from bert_jax.training import objectives, phases
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.checks import check_attention
from bert_jax.training.evaluation import evaluate_checkpoint
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.pretrain import pretrain
from bert_jax.training.run import claim_workdir
from bert_jax.training.train_step import describe_state, make_train_step

LENGTH, ROWS = 128, 16
MODEL = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
    max_position_embeddings=LENGTH,
)  # fmt: skip


def make_batch() -> HostBatch:
    batch = batches.make_batch(rows=ROWS, length=LENGTH, vocab_size=100, counts=np.full(ROWS, 4))
    return {**batch, "sequence_ids": batch["sequence_ids"] * (1 + (np.arange(LENGTH, dtype=np.int32) > 20))}


def interpret(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Makes the Pallas kernel run on any platform. Returns a list that collects the shapes it is traced with."""
    shapes = []

    def interpreted(qkv, *inputs, **settings):
        shapes.append(qkv.shape)
        return pallas_attention(qkv, *inputs, **settings, interpret=True)

    monkeypatch.setattr("bert_jax.model.pallas_attention.pallas_attention", interpreted)
    # The interpreter's loop returns its inputs without the mesh axes that they vary along; sums never have them.
    monkeypatch.setattr(
        "bert_jax.model.workarounds._on_every_axis",
        lambda function: _on_every_axis(lambda *arrays: function(*jax.tree.map(lambda array: array + 0, arrays))),
    )
    return shapes


def make_step(chosen: str, sizes: dict[str, int], dtype=jnp.float32, **model_sizes: object):
    mesh = make_mesh(MeshKeys(**{"data": 1, **sizes}), jax.devices()[: np.prod([*sizes.values()])])
    optimizer = make_optimizer(load_config("default").optimizer, abstract_parameters(MODEL)[2])
    model = dataclasses.replace(MODEL, **model_sizes)
    spec = describe_state(mesh, model, optimizer, seed=0, dtype=dtype, attention=chosen)
    return (
        mesh,
        spec,
        make_train_step(mesh, spec, optimizer, lambda step: 1e-3, objectives.pretraining(nsp=True), seed=0),
    )


@pytest.mark.long
def test_step_with_pallas_on_a_mesh_equals_the_step(monkeypatch: pytest.MonkeyPatch):
    shapes, results = interpret(monkeypatch), []
    for chosen, sizes in (("xla", {"data": 1}), ("pallas", {"data": 4, "fsdp": 2})):
        mesh, spec, step = make_step(chosen, sizes)
        with jax.set_mesh(mesh):
            state, metrics = step(spec.make(), put_batch(mesh, make_batch(), 2))
            results.append(jax.device_get((metrics, state.optimizer_state[1].mu)))
    assert set(shapes) == {(ROWS // 2 // 8, LENGTH, 3, 4, 8)}  # of a microbatch a device's rows
    models.assert_close(*results, rtol=1e-5, atol=1e-6)


SPLASH = {f"splash_mha_{name}" for name in (
    "fwd_segmented_residuals", "dkv_segmented_no_residuals", "dq_segmented_no_residuals"
)}  # fmt: skip


@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 2, "fsdp": 2}], ids=str)
@pytest.mark.parametrize("chosen", ["pallas", "splash"])
def test_the_step_with_a_kernel_is_lowered_to_its_calls(chosen, sizes):
    rate = 0.0 if chosen == "splash" else 0.1
    mesh, spec, step = make_step(chosen, sizes, dtype=jnp.bfloat16, hidden_size=128, attention_probs_dropout_prob=rate)
    with jax.set_mesh(mesh):
        batch = jax.eval_shape(lambda: put_batch(mesh, make_batch(), 1))
        text = step.lower(spec.abstract, batch, ("tpu",)).as_text()
    assert set(re.findall(r"custom_call @([\w$]+)", text)) == {"tpu_custom_call"}
    kernels = set(re.findall(r'kernel_name = "(\w+)"', text))
    assert kernels == (SPLASH if chosen == "splash" else {"attention_forward", "attention_backward"})


def test_the_step_with_cudnn_is_lowered_to_its_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    mesh, spec, step = make_step("cudnn", {"data": 2, "fsdp": 2}, dtype=jnp.bfloat16, attention_probs_dropout_prob=0.0)
    with jax.set_mesh(mesh):
        batch = jax.eval_shape(lambda: put_batch(mesh, make_batch(), 1))
        text = step.lower(spec.abstract, batch, ("cuda",)).as_text()
    calls = re.findall(r"custom_call @([\w$]+)", text)
    assert set(calls) == {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}
    squares = set(re.findall(rf"[0-9x]*{LENGTH}x{LENGTH}x(?:bf16|f32)", text))
    assert squares == {f"4x1x{LENGTH}x{LENGTH}xbf16"}  # the mask, of a device's rows and for all heads


def test_jax_refuses_cudnn_where_it_is_not_installed():
    qkv = jnp.ones((1, 8, 3, 1, 8), jnp.bfloat16)
    with pytest.raises(Exception, match=r"cuDNN is not detected|platform"):
        cudnn_attention(qkv, jnp.ones((1, 8, 8), bool))


def check(platform: str, *, seq_len: int = 128, tensor: int = 1, **overrides: object) -> None:
    chosen = {"model.attention_probs_dropout_prob": 0.0, "dtype": "bfloat16", **overrides}
    config = load_config("bert_tiny", [(key.replace("__", "."), str(value)) for key, value in chosen.items()])
    devices = np.array([SimpleNamespace(platform=platform)])
    model = BertConfig(**{**to_dict(config.model), "vocab_size": 100})
    check_attention(config, model, seq_len, SimpleNamespace(devices=devices, shape={"tensor": tensor}))


@pytest.mark.parametrize(
    ("platform", "settings", "message"),
    [
        ("tpu", {"attention": "pallas", "seq_len": 2056}, r"seq_len=2056\b.*--seq_len 2048"),
        ("tpu", {"attention": "pallas", "seq_len": 1032, "dtype": "float32"}, r"seq_len=1032\b.*--seq_len 1024"),
        ("tpu", {"attention": "pallas", "model__hidden_size": 192}, r"model\.hidden_size=192\b.* 128\b"),
        ("tpu", {"attention": "pallas", "tensor": 2}, r"mesh\.tensor=2\b.*mesh\.tensor=1\b"),
        (
            "tpu",
            {"attention": "pallas", "model__global_attn_every_n_layers": 3},
            r"model\.global_attn_every_n_layers=3\b",
        ),
        ("gpu", {"attention": "pallas"}, "attention=pallas: .*TPU.*GPU"),
        (
            "tpu",
            {"attention": "splash", "model__attention_probs_dropout_prob": 0.1},
            r"model\.attention_probs_dropout_prob=0\.1\b.*=0\.0",
        ),
        ("tpu", {"attention": "cudnn"}, "attention=cudnn: .*GPU.*TPU"),
        ("gpu", {"attention": "cudnn", "tensor": 2}, r"mesh\.tensor=2\b.*mesh\.tensor=1\b"),
        (
            "gpu",
            {"attention": "cudnn", "model__attention_probs_dropout_prob": 0.1},
            r"prob=0\.1\b.*model\.attention_probs_dropout_prob=0\.0",
        ),
        ("gpu", {"attention": "cudnn", "dtype": "float32"}, r"dtype=float32\b.*dtype=bfloat16"),
        ("gpu", {"attention": "cudnn", "seq_len": 127}, r"seq_len=127\b"),
        ("gpu", {"attention": "cudnn", "model__num_attention_heads": 32}, r"model\.num_attention_heads=32\b.*\b4\b"),
    ],
)
def test_unsupported_kernel_settings_are_refused_in_one_line(platform, settings, message):
    with pytest.raises(InputError, match=message) as refusal:
        check(platform, **settings)
    assert str(refusal.value).startswith(f"attention={settings['attention']}: ")
    assert str(refusal.value).endswith("attention=xla")
    assert "\n" not in str(refusal.value)


def test_supported_kernel_settings_are_accepted():
    for seq_len in (63, 128, 512, 2048):
        check("tpu", attention="pallas", seq_len=seq_len, model__attention_probs_dropout_prob=0.1)
    check("tpu", attention="pallas", dtype="float32", remat="attention")
    check("gpu", attention="cudnn", seq_len=510)
    check("cpu", attention="xla", seq_len=63, tensor=2, model__attention_probs_dropout_prob=0.1, dtype="float32")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attention": "flash"}, "attention=flash: .*xla, pallas, splash, cudnn"),
        ({"attention": "pallas"}, "attention=pallas: .*TPU.*CPU"),
        ({"attention": "cudnn", "model__attention_probs_dropout_prob": 0.0}, "attention=cudnn: .*GPU.*CPU"),
        (
            {"phases": "({'steps': 4}, {'steps': 4, 'attention': 'pallas'})"},
            "attention=pallas: .*TPU.*CPU",
        ),
    ],
)
def test_kernel_of_another_platform_is_refused_before_any_work(overrides, message, dataset_dir: Path, tmp_path: Path):
    chosen = {"model__attention_probs_dropout_prob": 0.1, **overrides}
    with pytest.raises(InputError, match=message):
        pretrain(helpers.small_config(dataset_dir, **chosen), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_checkpoint_trained_with_pallas_works_without_it(
    corpus_file: Path, vocabulary_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data, run = str(tmp_path / "data"), str(tmp_path / "run")
    helpers.prepare_dataset(corpus_file, vocabulary_file, Path(data), seq_len=LENGTH)

    def config(chosen: str, steps: int):
        return helpers.small_config(
            Path(data), attention=chosen, total_steps=steps, optimizer__warmup_steps=1, model__num_hidden_layers=1,
            model__max_position_embeddings=LENGTH, data__packing=True,
            eval_batches=-1, eval_every_steps=0,
        )  # fmt: skip

    with monkeypatch.context() as patched:
        patched.setattr(phases, "check_attention", lambda *of_phase: None)
        shapes = interpret(patched)
        found = pretrain(config("pallas", 2), run)
    assert set(shapes) == {(16 // 8, LENGTH, 3, 4, 8)}  # in training alone: no device evaluates its rows by itself
    assert open_checkpoint(run).config["attention"] == "pallas"
    assert evaluate_checkpoint(open_checkpoint(run), data) == pytest.approx(found, rel=1e-5)
    (tmp_path / "lines.txt").write_text("the old ship sees a storm .\n")
    extract(run, str(tmp_path / "lines.txt"), str(tmp_path / "features.jsonl"), layers="-1")
    assert pretrained.load(run).fill_mask("the old [MASK] sees a storm .")
    claimed = claim_workdir(epath.Path(run), helpers.open_phases(config("xla", 3)))  # it may go on
    assert claimed is not None
    assert claimed.step == 2
