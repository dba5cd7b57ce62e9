"""A run in several processes, which find each other as they would on several hosts, against the run in one."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from support import child_processes, helpers
from support.several import finish, start

from bert_jax.errors import BertJaxError, InputError
from bert_jax.runtime.interpreter import SIGNALS
from bert_jax.runtime.processes import joined_processes
from bert_jax.tracking.throughput import NOT_REPRODUCIBLE

SLURM_STEP = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "node[0-1]"}
LAUNCHER = helpers.REPOSITORY / "launch" / "local_cluster.sh"


def enter(environment: dict[str, str]) -> None:
    with joined_processes(environment):
        pass


def assert_same_rows(workdir: Path, other: Path) -> None:
    rows = [helpers.rows(path) for path in (workdir, other)]
    assert len(rows[0]) == len(rows[1]) > 0
    for a, b in zip(*rows, strict=True):
        assert a.keys() == b.keys()
        if a.get("split") == "samples":
            assert [sample["text"] for sample in a["samples"]] == [sample["text"] for sample in b["samples"]]
            continue
        for name in a.keys() - {"split", *NOT_REPRODUCIBLE}:
            expected = b[name] if isinstance(b[name], str) else pytest.approx(b[name], rel=1e-5)
            assert a[name] == expected, (a["step"], name)


@pytest.fixture(scope="module")
def alone(dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("alone")
    finish(start(1, dataset_dir, workdir))
    return workdir


@pytest.mark.parametrize(
    ("count", "mesh"),
    [
        pytest.param(2, {}, marks=pytest.mark.long),
        pytest.param(2, {"mesh__data": 1, "mesh__fsdp": 4}, marks=pytest.mark.long),
        pytest.param(4, {"mesh__data": 2, "mesh__tensor": 2}, marks=pytest.mark.long),
    ],
)
def test_several_processes_train_like_one(count, mesh, alone, dataset_dir, tmp_path: Path):
    written = finish(start(count, dataset_dir, tmp_path, **mesh))
    assert_same_rows(tmp_path, alone)
    assert helpers.kept_steps(tmp_path)[-1] == 6
    assert all("eval loss" not in text for text in written[1:])  # one process speaks for all


@pytest.mark.long
def test_several_processes_repeat_positions_like_one(
    dataset_dir: Path, corpus_file: Path, vocabulary_file: Path, tmp_path: Path
):
    helpers.prepare_dataset(corpus_file, vocabulary_file, tmp_path / "short", seq_len=32)
    phases = f"({{'steps': 3, 'data.path': '{tmp_path / 'short'}'}}, {{'steps': -1}})"
    settings = {"phases": phases, "repeat_positions": True}
    finish(start(1, dataset_dir, tmp_path / "one", **settings))
    written = finish(start(2, dataset_dir, tmp_path / "two", **settings, mesh__data=1, mesh__fsdp=4))
    assert "start as copies" in written[0]
    assert_same_rows(tmp_path / "two", tmp_path / "one")


@pytest.mark.long
def test_several_processes_fall_back_to_one_step(dataset_dir, tmp_path: Path):
    """Each holds a part of the arrays: the file that is lost is one that not all of them read."""
    mesh = {"mesh__data": 1, "mesh__fsdp": 4}
    finish(start(2, dataset_dir, tmp_path, **mesh))
    files = [path for path in (tmp_path / "checkpoints" / "6" / "parameters").rglob("d/*") if path.is_file()]
    max(files, key=lambda path: path.stat().st_size).unlink()
    written = finish(start(2, dataset_dir, tmp_path, **mesh, total_steps=8))
    assert "checkpoints/6 " in written[0]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "6", "6.damaged", "8"]
    rows = [row["step"] for row in helpers.train_rows(tmp_path)]
    assert rows == list(range(1, 9))


@pytest.mark.long
def test_several_processes_keep_the_same_milestones(dataset_dir, tmp_path: Path):
    mesh = {"mesh__data": 1, "mesh__fsdp": 4}
    finish(start(2, dataset_dir, tmp_path, **mesh, checkpoint__milestones="(0,2)", checkpoint__keep=1))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["0", "2", "6"]
    finish(start(2, dataset_dir, tmp_path, **mesh, total_steps=8, checkpoint__milestones="(7,)", checkpoint__keep=1))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["0", "2", "7", "8"]


@pytest.mark.parametrize("mesh", [{}, {"mesh__data": 1, "mesh__tensor": 4}], ids=["data", "tensor"])
@pytest.mark.long
def test_stop_signal_to_one_process_stops_all_at_one_step_and_one_process_resumes(dataset_dir, tmp_path: Path, mesh):
    many = {"total_steps": 2_000, "eval_every_steps": 0, "eval_batches": 0, "checkpoint__every_steps": 5_000, **mesh}
    processes = start(2, dataset_dir, tmp_path, **many)
    child_processes.wait_until(lambda: any(row["step"] >= 5 for row in helpers.rows(tmp_path)), processes[0])
    processes[1].send_signal(signal.SIGTERM)
    first, second = finish(processes, expect=75)
    step = helpers.kept_steps(tmp_path)[-1]
    assert re.search(rf"\bstep {step}\b", first)
    assert "SIGTERM: " not in first
    assert re.search(rf"SIGTERM: .*\bstep {step}\b", second)
    finish(start(1, dataset_dir, tmp_path, **{**many, "total_steps": step + 2}))
    assert helpers.kept_steps(tmp_path)[-1] == step + 2
    assert [row["step"] for row in helpers.rows(tmp_path)] == list(range(1, step + 3))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS= JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=: "),
        (
            {"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "a:1"},
            "JAX_NUM_PROCESSES=two",
        ),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2", "JAX_COORDINATOR_ADDRESS": "a:1"},
            "JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=2: ",
        ),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "127.0.0.1"},
            r"JAX_COORDINATOR_ADDRESS=127\.0\.0\.1 .*HOST:PORT",
        ),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, "SLURM_NTASKS=8: .*srun.* --ntasks=1 --cpus-per-task=8"),
    ],
)
def test_inconsistent_environment_variables_are_refused(environment, message):
    with pytest.raises(InputError, match=message):
        enter(environment)


@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {"TPU_WORKER_HOSTNAMES": "localhost"},
     {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "a:1"}],
)  # fmt: skip
def test_a_single_process_joins_nobody(environment, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jax.distributed.initialize", lambda **_: pytest.fail("joined"))
    enter(environment)


@pytest.mark.parametrize(
    "environment", [{**SLURM_STEP, "SLURM_PROCID": "1"}, {"TPU_WORKER_HOSTNAMES": "a,b"},
                    {"MEGASCALE_COORDINATOR_ADDRESS": "a"}],
)  # fmt: skip
def test_launchers_that_jax_knows_are_left_to_it(environment, monkeypatch: pytest.MonkeyPatch):
    joined = []
    monkeypatch.setattr("jax.distributed.initialize", lambda **options: joined.append(options))
    enter(environment)
    assert [set(options) for options in joined] == [{"heartbeat_timeout_seconds", "shutdown_timeout_seconds"}]


@pytest.mark.parametrize(
    ("variables", "visible"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, "all"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, "all"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, "0"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "JAX_LOCAL_DEVICE_IDS": "0"}, "0"),
    ],
)
def test_the_only_process_of_a_host_sees_all_its_gpus(variables, visible: str, monkeypatch: pytest.MonkeyPatch):
    before = jax.config.values["jax_cuda_visible_devices"]

    def initialize(**_):  # as JAX does for a process with a rank on its host
        jax.config.update("jax_cuda_visible_devices", "0")

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    try:
        enter({**SLURM_STEP, **variables})
        assert jax.config.values["jax_cuda_visible_devices"] == visible
    finally:
        jax.config.update("jax_cuda_visible_devices", before)


def test_tpu_host_joins_others_or_runs_alone(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def initialize(**options):
        asked.append(options)
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    monkeypatch.setattr("bert_jax.runtime.processes.cloud_tpu_init.running_in_cloud_tpu_vm", True)
    enter({})
    assert len(asked) == 1
    with pytest.raises(BertJaxError, match="coordinator_address"):
        enter(SLURM_STEP)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 0", 0),
        ("exit 75", 75),
        ('[ "$JAX_PROCESS_ID" = 1 ] && exit 75; exit 0', 75),
        ('[ "$JAX_PROCESS_ID" = 1 ] && exit 3; sleep 60', 3),
    ],
)
def test_the_local_cluster_ends_as_its_processes_do(script, status):
    done = child_processes.run(
        [LAUNCHER, "3", "sh", "-c", script], timeout=50,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == status, done.stderr


@pytest.mark.parametrize(
    "sent", [pytest.param(sent, marks=() if sent is signal.SIGTERM else pytest.mark.long) for sent in SIGNALS]
)
def test_local_cluster_numbers_its_processes_and_forwards_signals(sent: signal.Signals):
    script = (
        f'trap "exit 75" {sent.name[3:]}; '
        'echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS"; sleep 60 & wait'
    )
    obey = ["env", f"--default-signal={sent.name}"]  # tests may inherit that it is ignored, as under nohup
    process = child_processes.start([*obey, LAUNCHER, "2", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    lines = sorted(process.stdout.readline() for _ in range(2))
    process.send_signal(sent)
    assert process.wait(timeout=20) == 75
    assert [line.split(" at ")[0] for line in lines] == ["[0] 0 of 2", "[1] 1 of 2"]
    assert len({line.split(" at ")[1] for line in lines}) == 1
    assert child_processes.run([LAUNCHER, "none", "true"], timeout=20).returncode == 2
