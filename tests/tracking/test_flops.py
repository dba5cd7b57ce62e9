import pytest

from bert_jax.model import BertConfig
from bert_jax.model.task_heads import TaskHead
from bert_jax.tracking.throughput import finetuning_flops, peak_flops, training_flops

LARGE = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)


def test_bert_large_by_the_published_convention():
    assert training_flops(LARGE, 128, 20) / 1e9 == pytest.approx(240.6, abs=0.05)
    assert training_flops(LARGE, 512, 76) / 1e9 == pytest.approx(1019.7, abs=0.1)


def test_a_frozen_encoder_runs_forward_alone():
    whole = training_flops(LARGE, 128, 0, 1)
    assert finetuning_flops(LARGE, TaskHead("tag", 9), 128) == whole
    assert finetuning_flops(LARGE, TaskHead("tag", 9, features="last"), 128) == pytest.approx(whole / 3)
    tagger = TaskHead("tag", 9, bilstm=768, bilstm_layers=2, features="embeddings")
    products = 2 * 4 * 768 * (1024 + 768 + 2 * 768 + 768)  # both directions, four gates
    assert finetuning_flops(LARGE, tagger, 128) == pytest.approx(3 * 2 * 128 * products)


@pytest.mark.parametrize(
    ("device_kind", "tera"),
    [
        ("TPU v3", 61.5), ("TPU v4", 275), ("TPU v5 lite", 197), ("TPU v5", 459), ("TPU v5p", 459),
        ("TPU v6 lite", 918), ("TPU7x", 1153.5),  # half a chip
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835), ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500),
    ],
)  # fmt: skip
def test_peaks_are_known_by_device_kind(device_kind: str, tera: float):
    assert peak_flops(device_kind) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "device_kind", ["cpu", "TPU v4 lite", "TPU v5 next", "TPU v55", "NVIDIA H1000", "NVIDIA", "NVIDIA H200 MIG 1g.18gb"]
)
def test_device_name_that_is_a_prefix_of_another_is_distinct(device_kind: str):
    assert peak_flops(device_kind) is None
