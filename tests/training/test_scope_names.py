"""Names of the parts of a training step, for profiles."""

import json
import subprocess
import sys

import pytest
from support import helpers

PROGRAM = """
import contextlib, hashlib, json, re, sys
import jax
named = sys.argv[1] == "named"
if not named:
    class Nothing(contextlib.ContextDecorator, contextlib.nullcontext):
        pass
    jax.named_scope = lambda name: Nothing()
from bert_jax.config import load_config
from bert_jax.ahead_of_time.compiled_step import plans
from bert_jax.model import BertConfig
from bert_jax.parallel.mesh import make_mesh
from bert_jax.sections import to_dict
from bert_jax.training.phases import abstract_batch
from bert_jax.training.pretrain import plan_step
settings = {
    "model.hidden_size": 32, "model.num_attention_heads": 2, "model.intermediate_size": 64, "model.vocab_size": 200,
    "model.hidden_dropout_prob": 0.1, "model.max_position_embeddings": 16, "global_batch_size": 8,
}
config = load_config("bert_tiny", [(key, str(value)) for key, value in settings.items()])
mesh = make_mesh(config.mesh)
model = BertConfig.from_dict({**to_dict(config.model), "is_decoder": False})
spec, step = plan_step(mesh, plans(config, None)[0], model)
batch = abstract_batch(mesh, config, 16, 3, 1)
with jax.set_mesh(mesh):
    lowered = step.lower(spec.abstract, batch)
found = {"digest": hashlib.sha256(lowered.as_text().encode()).hexdigest(), "names": []}
if named:
    paths = re.findall(r'op_name="([^"]*)"', lowered.compile().as_text())
    found["names"] = sorted({name for path in paths for name in re.findall(r"\\w+", path)})
print(json.dumps(found))
"""


def run(argument: str) -> dict:
    environment = helpers.child_environment(devices=2, JAX_ENABLE_COMPILATION_CACHE="0")  # a program keeps old names
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument], env=environment, capture_output=True, text=True, check=False,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def named() -> dict:
    return run("named")


def test_operations_are_named_after_their_part_of_the_step(named: dict):
    expected = {
        "embeddings", "encoder", "attention", "feed_forward", "layer_norm", "dropout", "pooler", "mlm_head", "nsp_head",
        "mlm_loss", "gradient_reduction", "optimizer",
    }  # fmt: skip
    assert expected <= set(named["names"])


@pytest.mark.long
def test_names_do_not_change_the_program(named: dict):
    assert run("unnamed")["digest"] == named["digest"]
