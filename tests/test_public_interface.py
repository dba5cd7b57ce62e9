"""The public names of `bert_jax`: listed, importable, and not imported before they are used."""

import subprocess
import sys

import pytest

import bert_jax


def test_every_public_name_is_listed_and_found():
    assert len(set(bert_jax.__all__)) == len(bert_jax.__all__)
    assert set(bert_jax.__all__) <= set(dir(bert_jax))
    for name in bert_jax.__all__:
        assert getattr(bert_jax, name) is not None
    assert bert_jax.load.__module__ == "bert_jax.inference.pretrained"
    with pytest.raises(AttributeError, match="nothing"):
        bert_jax.nothing  # noqa: B018


def test_listing_names_imports_none_of_them():
    program = "import sys, bert_jax; assert 'load' in dir(bert_jax); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
