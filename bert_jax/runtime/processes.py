"""Processes of a run: one on a laptop, one per host on a TPU pod, one per GPU or node under Slurm."""

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import jax
import numpy as np
from jax._src import cloud_tpu_init, distributed  # the client has no public name
from jax.experimental import multihost_utils

from bert_jax.errors import BertJaxError, InputError, Interrupted, NotBegun, exit_status

log = logging.getLogger(__name__)

_is_reported = False
_PLAIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
RESTART_ADVICE = "rerun the same command; it resumes from the newest checkpoint"
_FAILURE = "bert_jax/failure"


def _is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Returns whether Slurm, Cloud TPU or GKE has started several processes."""
    is_slurm = environment.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in environment
    if is_slurm and "SLURM_STEP_NODELIST" not in environment:  # in a batch script, which Slurm starts once
        tasks = environment["SLURM_NTASKS"]
        hint = f"use srun, or --ntasks=1 --cpus-per-task={tasks} for one process with as many cores"
        raise InputError(f"SLURM_NTASKS={tasks}: a batch script is one process; {hint}")
    is_pod = "," in environment.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in environment
    return is_slurm or is_pod


@contextmanager
def joined_processes(environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Joins the other processes of the run, if there are any. Has to be the first use of JAX.

    An error that leaves this context ends the other processes with its status. See `ends_alone` for how this process
    should end then. JAX's coordination service ends all processes where one is lost. At the end all wait for each
    other, up to a day: process 0 may have to upload metrics.

    The variables `JAX_COORDINATOR_ADDRESS` (HOST:PORT), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` come first. Slurm,
    Cloud TPU and GKE are recognized by their variables, from which JAX reads the rest.

    Raises InputError if only some of the three variables are set or one is invalid, and BertJaxError if the other
    processes do not connect.
    """
    global _is_reported
    _join(environment)
    number, count = joined() or (0, 1)
    if count == 1:
        yield
        return
    client: Any = distributed.global_state.client
    if not is_first():
        logging.getLogger("bert_jax").setLevel(logging.WARNING)
    log.info("This is process %d of %d", number, count)
    watch = threading.Thread(target=_watch_failures, args=(client, number), name="failures", daemon=True)
    watch.start()
    try:
        yield
    except BaseException as error:
        if isinstance(error, Interrupted) and not isinstance(error, NotBegun):  # all end by themselves, after a save
            _meet_at_end(client, watch)
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        is_lost = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in message
        if is_lost:
            time.sleep(10)  # `watch` ends this process if another has said why
            message = f"a collective failed, probably because another process is lost: {RESTART_ADVICE} ({message})"
        failure = {"status": exit_status(error), "number": number}
        with suppress(Exception):  # another process was first, or process 0 has ended
            client.key_value_set(_FAILURE, json.dumps({**failure, "message": message}))
        time.sleep(3 if number == 0 else 0)  # until all have read it: JAX aborts them as soon as process 0 ends
        _is_reported = True
        if is_lost:
            raise BertJaxError(message) from error
        raise
    _meet_at_end(client, watch)


def _watch_failures(client: Any, number: int) -> None:
    """Ends this process when another one reports that it fails, or when process 0 is lost."""
    try:
        content = client.blocking_key_value_get(_FAILURE, 365 * 24 * 3600 * 1000)
    except Exception as error:
        log.error("Process 0 has ended: %s (%s)", RESTART_ADVICE, str(error).strip().split("\n")[0])
        os._exit(BertJaxError.exit_status)
    failure = json.loads(content)
    if failure and failure["number"] != number:
        log.error("Process %d ended the run: %s", failure["number"], failure["message"])
        time.sleep(3 if number == 0 else 0)
        os._exit(failure["status"])


def _meet_at_end(client: Any, watch: threading.Thread) -> None:
    """Waits for all processes. Afterwards no process works alone: JAX's shutdown aborts those that wait for long."""
    client.wait_at_barrier("bert_jax/end", 24 * 3600 * 1000)
    client.key_value_set(_FAILURE, "null", allow_overwrite=True)
    watch.join()


def _join(environment: Mapping[str, str]) -> None:
    """Connects to the other processes, if there are any. Raises as `joined_processes`."""
    options = _plain_options(environment)
    is_certain = bool(options) or _is_one_of_several(environment)
    # A host with TPUs may be one of a pod slice, whose hosts find each other by metadata.
    sees_tpus = cloud_tpu_init.running_in_cloud_tpu_vm and "tpu" in environment.get("JAX_PLATFORMS", "tpu")
    if options.get("num_processes") == 1 or (not is_certain and not sees_tpus):
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM, which StopSignal does
    try:
        # A lost process ends the others after a minute. At the end all have met when they shut down.
        jax.distributed.initialize(heartbeat_timeout_seconds=60, shutdown_timeout_seconds=60, **options)
    except (RuntimeError, ValueError) as error:
        if not is_certain and isinstance(error, ValueError):  # TPUs of a single host that is not a Cloud TPU VM
            return
        reason = str(error).strip().split("\n")[0]
        raise BertJaxError(f"the processes of the run could not connect: {reason}") from error
    is_alone = re.fullmatch(r"1(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if is_alone and "JAX_LOCAL_DEVICE_IDS" not in environment:  # JAX takes one GPU for each process of Slurm
        jax.config.update("jax_cuda_visible_devices", "all")
    if joined() and jax.default_backend() == "cpu":
        # XLA:CPU (jaxlib 0.10.2) forgets the order of independent collectives in a program that comes from JAX's cache,
        # and Gloo pairs them by their order: processes wait forever, abort, or exchange the wrong numbers.
        jax.config.update("jax_enable_compilation_cache", False)


def _plain_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the options of `jax.distributed.initialize` in the three variables, none if all are unset."""
    values = [environment.get(name, "") for name in _PLAIN]
    if not any(values):
        return {}
    address, count, number = values
    if re.fullmatch(r".+:\d{1,5} \d{1,9} \d{1,9}", " ".join(values)) and int(number) < int(count):
        return {"coordinator_address": address, "num_processes": int(count), "process_id": int(number)}
    given = " ".join(f"{name}={value}" for name, value in zip(_PLAIN, values, strict=True))
    raise InputError(f"{given}: expected HOST:PORT of process 0, a count and a number below it; or set none of them")


def joined() -> tuple[int, int] | None:
    """Returns index and count of the processes of the run, None for a single one. Does not initialize JAX."""
    state = distributed.global_state
    return (state.process_id, state.num_processes) if state.client and state.num_processes > 1 else None


def is_first() -> bool:
    """Returns whether this is process 0, which writes metrics, config and info logs."""
    return jax.process_index() == 0


def any_process(condition: bool) -> bool:
    """Returns, in all processes, whether `condition` holds in any; all have to call it."""
    return bool(multihost_utils.process_allgather(np.array(condition)).any())


def check_agreement(name: str, value: str) -> None:
    """Raises BertJaxError in all processes unless `value` is the same in all; all have to call it."""
    mine = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
    if any_process(not np.array_equal(multihost_utils.broadcast_one_to_all(mine), mine)):
        raise BertJaxError(f"{name}: {value} here, and another in another process; {RESTART_ADVICE}")


def ends_alone() -> bool:
    """Returns whether the failure of this process was reported, so that it must exit without JAX's shutdown barrier."""
    return _is_reported
