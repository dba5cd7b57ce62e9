"""Code that would run what it reads: ruff's rules S refuse it; here is what they do not know, with the exceptions."""

import re

from support.helpers import REPOSITORY

DANGERS = (
    r"allow_pickle=(?!False)|trust_remote_code|run_path|torch\.load\((?!.*weights_only=True)"
    r"|\bimport (?:pickle|marshal|shelve|dill|cloudpickle|joblib)\b"
)
ALLOWED = {
    ("bert_jax/config.py", "run_path"),  # a config file is code, which its user chooses
    ("bert_jax/data/preparation/beam.py", "import pickle"),  # results of Beam's workers, in a folder of a random name
    ("bert_jax/interop/weights.py", "import pickle"),  # its UnpicklingError alone
}


def test_nothing_that_is_read_is_run_but_the_exceptions():
    paths = [path for folder in ("bert_jax", "configs") for path in (REPOSITORY / folder).rglob("*.py")]
    found = {
        (str(path.relative_to(REPOSITORY)), one) for path in paths for one in re.findall(DANGERS, path.read_text())
    }
    assert found == ALLOWED
