"""Tests the manifest of launch/gke_jobset.sh against the models of JobSet's and Kubernetes' own OpenAPI."""

import os
import re
import subprocess
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from support import helpers

SCRIPT = helpers.REPOSITORY / "launch" / "gke_jobset.sh"
VALUES = {
    "NAME": "bert", "IMAGE": "europe-west4-docker.pkg.dev/p/r/bert-jax:v1", "CLAIM": "runs",
    "ACCELERATOR": "tpu-v6e-slice", "TOPOLOGY": "4x8",
}  # fmt: skip


def call(*arguments: str, **values: str) -> subprocess.CompletedProcess:
    environment = {"PATH": os.environ["PATH"], **VALUES, **values}
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False)


def render(*command: str, **values: str) -> dict[str, Any]:
    done = call("--", *(command or ("bert-jax", "pretrain")), **values)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def assert_valid(manifest: dict[str, Any]) -> None:
    """Asserts that types and required fields are the models'; they drop an unknown field in the round trip."""
    assert JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest


def job_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


@pytest.mark.parametrize("values", [{}, {"SPOT": "no", "SLICES": "4", "ACCELERATOR": "tpu7x", "TOPOLOGY": "2x2x4"}])
def test_it_is_a_jobset(values: dict[str, str]):
    manifest = render(**values)
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert_valid(manifest)


def test_hosts_slices_and_spot_nodes():
    manifest = render(TOPOLOGY="4x8", CHIPS_PER_HOST="4", SLICES="3", MAX_FAILURES="7")
    job = job_of(manifest)
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == 8
    assert manifest["spec"]["replicatedJobs"][0]["replicas"] == 3
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 7
    pod = job["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert pod["containers"][0]["securityContext"] == {"runAsUser": 0}  # opens devices, writes to a new volume
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert "spot" not in yaml.safe_dump(render(SPOT="no"))


def test_the_command_arrives_as_it_was_typed():
    words = ["bert-jax", 'a "b" \\c', "two  words: #", "${NAME} ${IMAGE}", "ü", "--config.phases=({'steps': 1},)"]
    assert job_of(render(*words))["template"]["spec"]["containers"][0]["command"] == words
    # Kubernetes fills in $(NAME) itself, and takes $$(NAME) for $(NAME)
    assert job_of(render("sh", "$(NAME)"))["template"]["spec"]["containers"][0]["command"] == ["sh", "$$(NAME)"]


def outcome(manifest: dict[str, Any], exit_status: int = 0, condition: str = "") -> str:
    """Simulates the Job and JobSet controllers: returns the action on the JobSet when a pod ends so."""
    job = job_of(manifest)
    assert job["backoffLimit"] == 0
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        codes = rule.get("onExitCodes")
        if codes and codes["operator"] == "In" and exit_status in codes["values"]:
            said = (
                f"Container {codes['containerName']} for pod default/bert failed with exit code {exit_status} matching"
            )
        elif any(one["type"] == condition and one["status"] == "True" for one in rule.get("onPodConditions", ())):
            said = f"Pod default/bert has condition {condition} matching"
        else:
            continue
        assert rule["action"] == "FailJob"
        reason, message = "PodFailurePolicy", f"{said} FailJob rule at index {index}"
        break
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


def test_exit_statuses_decide():
    manifest = render()
    assert outcome(manifest, 2) == "FailJobSet"
    assert outcome(manifest, 75) == "RestartJobSetAndIgnoreMaxRestarts"
    assert outcome(manifest, 1) == "RestartJobSet"
    assert outcome(manifest, 137) == "RestartJobSet"
    assert outcome(manifest, 12) == "RestartJobSet"
    assert outcome(manifest, 137, "DisruptionTarget") == "RestartJobSetAndIgnoreMaxRestarts"
    assert outcome(manifest, 2, "DisruptionTarget") == "FailJobSet"
    containers = job_of(manifest)["template"]["spec"]["containers"]
    for rule in job_of(manifest)["podFailurePolicy"]["rules"][:2]:
        assert [rule["onExitCodes"]["containerName"]] == [container["name"] for container in containers]


@pytest.mark.parametrize(
    ("arguments", "values", "names"),
    [
        ([], {}, ["command", " -- "]),
        (["--dry"], {}, ["--dry"]),
        (["--", "x"], {"CLAIM": ""}, ["CLAIM"]),
        (["--", "x"], {"IMAGE": "a b"}, ["IMAGE=a b"]),
        (["--", "x"], {"ACCELERATOR": "v6e"}, ["ACCELERATOR=v6e", "tpu-v6e-slice"]),
        (["--", "x"], {"TOPOLOGY": "2x2x4"}, ["TOPOLOGY=2x2x4", "tpu-v6e-slice", "4x4"]),
        (["--", "x"], {"TOPOLOGY": "3x3"}, ["TOPOLOGY=3x3", "9 chips", "CHIPS_PER_HOST=4"]),
        (["--", "x"], {"SLICES": "one"}, ["SLICES=one"]),
        (["--", "x"], {"NAME": "b" * 41}, ["NAME=bb", "up to 40"]),
        (["--", "x"], {"SPOT": "maybe"}, ["SPOT=maybe", "yes", "no"]),
        (["--", "a\nb"], {}, ["COMMAND"]),
    ],
)
def test_usage_errors_are_one_line_and_status_2(arguments: list[str], values: dict[str, str], names: list[str]):
    done = call(*arguments, **values)
    assert done.returncode == 2
    assert all(name in done.stderr for name in names), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout
