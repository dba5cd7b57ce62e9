#!/usr/bin/env bash
# Runs a command in N processes of this machine that join one run, as N hosts would:
#
#     launch/local_cluster.sh 2 bert-jax pretrain --config=bert_tiny --workdir=runs/two --config.data.path=data
#
# Each line of output starts with the index of its process. SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded
# to all processes. When a process fails, the others receive SIGTERM. The exit status is that of the first process that
# failed; otherwise 75 (saved, rerun the command) if any process exited with it; otherwise 0.
exec python3 - "$@" <<'PYTHON'
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

SAVED = 75

if len(sys.argv) < 3 or not sys.argv[1].isdigit() or sys.argv[1] == "0":
    print("usage: launch/local_cluster.sh N COMMAND...   (N: number of processes, at least 1)", file=sys.stderr)
    sys.exit(2)
count, command = int(sys.argv[1]), sys.argv[2:]
if not shutil.which(command[0]):
    print(f"launch/local_cluster.sh: {command[0]}: command not found", file=sys.stderr)
    sys.exit(2)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"


def copy(number, source, target):
    for line in source:  # to its end, even if nobody reads the copy: a process with a full pipe blocks
        with contextlib.suppress(OSError):
            os.write(target, b"[%d] %b" % (number, line))


def send(number, _frame=None):
    asked.append(number)
    for process in processes:
        try:
            os.killpg(process.pid, number)  # each process leads its own group
        except ProcessLookupError:
            pass


processes, copies, asked = [], [], []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
        signal.signal(number, send)
for number in range(count):
    together = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(number)}
    processes.append(
        subprocess.Popen(
            command, env={**os.environ, **together}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
    )
    for pipe, target in ((processes[-1].stdout, 1), (processes[-1].stderr, 2)):
        copies.append(threading.Thread(target=copy, args=(number, pipe, target), daemon=True))
        copies[-1].start()
for number in list(asked):  # signals that arrived while processes were being started
    send(number)

failed = 0
while None in (statuses := [process.poll() for process in processes]):
    if not failed and (failed := next((status for status in statuses if status not in (None, 0, SAVED)), 0)):
        send(signal.SIGTERM)
    time.sleep(0.05)
for thread in copies:
    thread.join(timeout=2)  # a child that outlives its process may keep the output open
failed = failed or next((status for status in statuses if status not in (0, SAVED)), 0)
sys.exit((failed if failed > 0 else 128 - failed) if failed else SAVED if SAVED in statuses else 0)
PYTHON
