"""Slurm cluster of one node on the loopback interface, in its own folder: real munged, slurmctld and slurmd.

It needs root and Debian's packages `slurm-wlm` and `munge`, and touches nothing outside its folder.
"""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support import child_processes

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
NODE = "localhost"
# Requeued jobs start only after their old credential has expired, by default in two minutes.
CONFIG = """
ClusterName=loopback
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=30
InactiveLimit=0
OverTimeLimit=0
GresTypes=gpu
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={daemon} CPUs=4 Gres=gpu:2 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes={node} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes={node} MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """Returns the reason why no cluster can run here, in one line, or an empty string."""
    if os.geteuid() != 0:
        return f"a Slurm of one's own needs root, not {getpass.getuser()}"
    absent = [program for program in PROGRAMS if not shutil.which(program, path=_path())]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install --no-install-recommends slurm-wlm munge"
    return ""


class Cluster:
    """Client of a running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}

    def run(self, *command: object) -> str:
        done = child_processes.run([*map(str, command)], env=self.environment, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Returns the fields of a job: JobState, Reason, Restarts, ExitCode and others."""
        words = self.run("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in self.folder.glob("slurm*.log"))

    def wait(self, what: Callable[[], object], seconds: float, why: Callable[[], str]) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"{why()}\n{self.logs()}"
            time.sleep(0.2)


@contextmanager
def one_node_cluster(folder: Path) -> Iterator[Cluster]:
    """Starts the daemons in the foreground as child processes, and ends only those."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755)
    folder.chmod(0o755)
    key = folder / "munge" / "key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(1024))
    controller, daemon = _free_ports(2)
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(
        CONFIG.format(folder=folder, controller=controller, daemon=daemon, node=NODE, host=host).lstrip()
    )
    (folder / "gres.conf").write_text(f"AutoDetect=off\nNodeName={NODE} Name=gpu File=/dev/tty[0-1]\n")
    cluster = Cluster(folder)
    munge = folder / "munge"
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge / 'socket'}",
         f"--pid-file={munge / 'pid'}", f"--seed-file={munge / 'seed'}", f"--log-file={munge / 'log'}"],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", NODE],
    ]  # fmt: skip
    started: list[subprocess.Popen] = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("wb") as output:
                started.append(
                    subprocess.Popen(
                        command, env=cluster.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                    )
                )
            if command[0] == "munged":
                cluster.wait((munge / "socket").exists, 20, lambda: (folder / "munged.out").read_text())
        cluster.wait(lambda: _is_idle(cluster), 60, lambda: "the node does not come up")
        yield cluster
    finally:
        try:
            if len(started) == len(commands):
                subprocess.run(["scancel", "--user=root"], env=cluster.environment, check=False, timeout=30)
        finally:
            for process in reversed(started):
                process.send_signal(signal.SIGTERM)
            for process in reversed(started):
                try:
                    process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _is_idle(cluster: Cluster) -> bool:
    shown = child_processes.run(["sinfo", "--noheader", "--format=%T"], env=cluster.environment, timeout=60)
    return set(shown.stdout.split()) == {"idle"}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
