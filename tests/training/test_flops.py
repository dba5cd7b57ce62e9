import pytest

from bert_jax.model import BertConfig
from bert_jax.training.flops import peak_flops, training_flops

LARGE = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)


def test_bert_large_by_the_published_convention():
    assert training_flops(LARGE, 128, 20) / 1e9 == pytest.approx(240.6, abs=0.05)
    assert training_flops(LARGE, 512, 76) / 1e9 == pytest.approx(1019.7, abs=0.1)


def test_peaks_are_known_by_device_kind():
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v5") == 459e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("cpu") is None
