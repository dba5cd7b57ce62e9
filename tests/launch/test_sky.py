"""launch/sky.yaml: SkyPilot's own schema (`make test-sky`), and what its scripts do on a host."""

import copy
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]  # `make test-sky` has no package of bert_jax
CONFIG = yaml.safe_load((REPOSITORY / "launch" / "sky.yaml").read_text())
SCHEMA = {"reason": "needs skypilot, in an environment of its own: make test-sky"}


def task(config: dict[str, Any]) -> Any:
    sky = pytest.importorskip("sky", **SCHEMA)
    return sky.Task.from_yaml_config(config, env_overrides=[("COMMAND", "bert-jax check")])


def keys(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yields the path of every key but the names of environment variables."""
    for key in value if isinstance(value, dict) and path != ("envs",) else ():
        yield (*path, key)
        yield from keys(value[key], (*path, key))


@pytest.mark.parametrize("accelerators", ["tpu-v6e-256", "tpu-v5p-128", "H100:8"])
def test_skypilot_accepts_it_on_any_accelerator(accelerators: str):
    made = task(copy.deepcopy(CONFIG))
    made.set_resources_override({"accelerators": accelerators})
    (resources,) = made.resources
    assert resources.use_spot
    assert resources.job_recovery["recover_on_exit_codes"] == [75]
    runtime = (resources.accelerator_args or {}).get("runtime_version")
    assert runtime == {"tpu-v6e-256": "v2-alpha-tpuv6e", "tpu-v5p-128": "v2-alpha-tpuv5"}.get(accelerators)


def test_skypilot_refuses_any_misspelt_key_and_a_missing_command(monkeypatch: pytest.MonkeyPatch):
    sky = pytest.importorskip("sky", **SCHEMA)
    monkeypatch.setenv("IS_SKYPILOT_SERVER", "1")  # whose schema has no keys for plugins to read
    monkeypatch.setattr("sky.server.plugins.plugins_loaded", lambda: True)
    for path in keys(CONFIG):
        wrong = copy.deepcopy(CONFIG)
        inside = wrong
        for key in path[:-1]:
            inside = inside[key]
        inside[f"{path[-1]}x"] = inside.pop(path[-1])
        with pytest.raises(ValueError, match=f"{path[-1]}x"):
            task(wrong)
    with pytest.raises(ValueError, match="COMMAND"):
        sky.Task.from_yaml_config(copy.deepcopy(CONFIG))


def run(command: str, device: str = "tpu", nodes: str = "1") -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": os.environ["PATH"], "HOME": "/nowhere", "COMMAND": command, "DEVICE": device,
        "SKYPILOT_NUM_NODES": nodes, "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }  # fmt: skip
    return subprocess.run(["bash", "-c", CONFIG["run"]], env=environment, capture_output=True, text=True, check=False)


def test_a_command_of_several_lines_is_one_command():
    """A line break within the quotation marks of --env, as the guides have it, ended the command."""
    done = run("printf '%s|' --workdir=gs://a\n    --config.data.path=gs://b\n  --config.seed=1")
    assert (done.returncode, done.stdout) == (0, "--workdir=gs://a|--config.data.path=gs://b|--config.seed=1|")


@pytest.mark.parametrize(
    ("device", "nodes", "coordinator"), [("tpu", "4", ""), ("gpu", "1", ""), ("gpu", "2", "10.0.0.1:8476 2 1")]
)
def test_command_gets_the_processes_and_its_exit_status_is_that_of_the_job(device: str, nodes: str, coordinator: str):
    command = "echo $JAX_PLATFORMS $JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID; exit 75"
    done = run(command, device, nodes)
    assert done.returncode == 75
    assert done.stdout.split() == [{"tpu": "tpu,cpu", "gpu": "cuda,cpu"}[device], *coordinator.split()]


def test_hosts_install_the_versions_that_the_tests_ran_with():
    (name,) = {word for word in CONFIG["setup"].split() if word.startswith("constraints/")}
    pinned = {pin.name: pin for pin in map(Requirement, (REPOSITORY / name).read_text().splitlines())}
    for package in ("jax", "jaxlib", "libtpu", "gcsfs"):
        assert str(pinned[package].specifier).startswith("==")
    assert f"--python 3.{name.removeprefix('constraints/py3').removesuffix('.txt')} " in CONFIG["setup"]
