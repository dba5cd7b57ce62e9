"""The public names of `bert_jax`: listed, importable, and not imported before they are used."""

from pathlib import Path

import pytest
from support import helpers

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
    helpers.run_python(program)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "all"}, "layers=all: expected a value of type tuple"),
        ({"drop": [5]}, r"drop\.0=5: expected a value of type str"),
        ({}, "none: no model found"),
    ],
)
def test_values_are_of_their_types_and_a_path_is_a_text(options: dict, message: str, tmp_path: Path):
    with pytest.raises(bert_jax.InputError, match=message):
        bert_jax.import_(Path("none"), tmp_path / "imported", **options)
    with pytest.raises(bert_jax.InputError, match=r"batch_size=8\.5: expected a value of type int"):
        bert_jax.predict("none", "none", "none", batch_size=8.5)
    with pytest.raises(bert_jax.InputError, match=r"none\.csv: got a table"):
        bert_jax.features("none", Path("none.csv"), tmp_path / "out")
