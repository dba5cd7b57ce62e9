"""Processes of a run: one on a laptop, one per host on a TPU pod, one per GPU or node under Slurm."""

import glob
import importlib.util
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
from jax._src import distributed, xla_bridge  # the client and the state of the backends have no public name
from jax.experimental import multihost_utils

from bert_jax.errors import BertJaxError, InputError, Interrupted, NotBegun

log = logging.getLogger(__name__)

_is_reported = False
_joined: tuple[int, int] | None = None
_PLAIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
RESTART_ADVICE = "rerun the same command; it resumes from the newest checkpoint"
_HEARTBEAT_SECONDS = 60  # without a heartbeat until JAX ends the other processes
_SHUTDOWN_SECONDS = 60  # from the first to the last process, once all have met at the end
_REASON_SECONDS = 10  # that a process which fails waits for the others, and after a failed collective for the reason
_DAY_MS = 24 * 3600 * 1000
_FAILURE = "bert_jax/failure"


def _is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Returns whether a launcher that JAX supports has started several processes."""
    tasks = _count("SLURM_NTASKS", environment)
    if tasks > 1 and "SLURM_PROCID" in environment:
        if "SLURM_STEP_NODELIST" not in environment:  # in a batch script, which Slurm starts once
            raise InputError(
                f"SLURM_NTASKS={tasks}: a batch script is one process; start the command with srun, or ask for the "
                f"cores of one process with --ntasks=1 --cpus-per-task={tasks}"
            )
        return True
    if _count("OMPI_COMM_WORLD_SIZE", environment) > 1:
        if "OMPI_MCA_orte_hnp_uri" not in environment:
            raise InputError(
                "OMPI_COMM_WORLD_SIZE: Open MPI 5 does not tell the address of process 0, as earlier versions did; set "
                "JAX_COORDINATOR_ADDRESS=HOST:PORT of process 0, such as node0:12345"
            )
        return True
    return "," in environment.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in environment


def _has_host_alone(environment: Mapping[str, str]) -> bool:
    """Returns whether a launcher has started this process alone on its host."""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", ""))
    return re.fullmatch(r"1(\(x\d+\))?", tasks) is not None and "JAX_LOCAL_DEVICE_IDS" not in environment


def _count(name: str, environment: Mapping[str, str]) -> int:
    """Returns the number of processes in a launcher's variable, 1 without it. Raises InputError if it is no number."""
    value = environment.get(name, "1")
    if not re.fullmatch("[0-9]{1,9}", value):
        raise InputError(f"{name}={value}: must be a number of processes; unset it for a single process")
    return int(value)


def _sees_tpus(environment: Mapping[str, str]) -> bool:
    """Returns whether this host has TPUs. It may be one of a pod slice, whose hosts find each other by metadata."""
    chips = [*glob.glob("/dev/accel[0-9]*"), *glob.glob("/dev/vfio/[0-9]*")]
    is_enabled = "tpu" in environment.get("JAX_PLATFORMS", "tpu")
    return is_enabled and bool(chips) and importlib.util.find_spec("libtpu") is not None


@contextmanager
def joined_processes(environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Joins the other processes of the run, if there are any. Has to be the first use of JAX.

    An error that leaves this context ends the other processes with its status. See `ends_alone` for how this process
    should end then. JAX's coordination service ends all processes where one is lost. At the end all wait for each
    other, up to a day: process 0 may have to upload metrics.

    The variables `JAX_COORDINATOR_ADDRESS` (HOST:PORT), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` come first. Slurm,
    Open MPI, Cloud TPU and GKE are recognized by their variables, from which JAX reads the rest.

    Raises InputError if only some of the three variables are set or one is invalid, and BertJaxError if the other
    processes do not connect.
    """
    global _is_reported, _joined
    client = _join(environment)
    if client is None:
        yield
        return
    _joined = number, count = jax.process_index(), jax.process_count()
    if not is_first():
        logging.getLogger("bert_jax").setLevel(logging.WARNING)
    log.info("This is process %d of %d", number, count)
    watch = threading.Thread(target=_watch_failures, args=(client, number), name="failures", daemon=True)
    watch.start()
    try:
        yield
    except BaseException as caught:
        error = _convert_collective_error(caught)
        if isinstance(error, Interrupted) and not isinstance(error, NotBegun):  # all end by themselves, after a save
            _meet_at_end(client, watch)
            raise
        if error is not caught:
            time.sleep(_REASON_SECONDS)  # `watch` ends this process if another has said why
        message = " ".join(str(error).split()) or type(error).__name__
        failure = {"status": getattr(error, "exit_status", BertJaxError.exit_status), "number": number}
        with suppress(Exception):  # another process was first, or process 0 has ended
            client.key_value_set(_FAILURE, json.dumps({**failure, "message": message}))
        _wait_for_readers(client, number)
        _is_reported = True
        if error is caught:
            raise
        raise error from caught
    _meet_at_end(client, watch)


def _watch_failures(client: Any, number: int) -> None:
    """Ends this process when another one reports that it fails, or when process 0 is lost."""
    try:
        content = client.blocking_key_value_get(_FAILURE, 365 * _DAY_MS)
    except Exception as error:
        log.error("Process 0 has ended: %s (%s)", RESTART_ADVICE, str(error).strip().split("\n")[0])
        os._exit(BertJaxError.exit_status)
    failure = json.loads(content)
    if failure and failure["number"] != number:
        log.error("Process %d ended the run: %s", failure["number"], failure["message"])
        _wait_for_readers(client, number)
        os._exit(failure["status"])


def _wait_for_readers(client: Any, number: int) -> None:
    """Waits until all processes know of a failure, but not for those that are lost."""
    with suppress(Exception):
        client.wait_at_barrier("bert_jax/failed", _REASON_SECONDS * 1000)
    if number == 0:  # JAX aborts the others as soon as it ends
        time.sleep(1)


def _meet_at_end(client: Any, watch: threading.Thread) -> None:
    """Waits for all processes. Afterwards no process works alone: JAX's shutdown aborts those that wait for long."""
    client.wait_at_barrier("bert_jax/end", _DAY_MS)
    if is_first():
        client.key_value_set(_FAILURE, "null")
    watch.join()


def _convert_collective_error(error: BaseException) -> BaseException:
    """Converts the JaxRuntimeError of a failed collective to a one-line error."""
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" in str(error):
        return error
    reason = str(error).strip().split("\n")[0]
    return BertJaxError(f"a collective failed, probably because another process is lost: {RESTART_ADVICE} ({reason})")


def _join(environment: Mapping[str, str]) -> Any | None:
    """Returns the client of JAX's coordination service, None for a single one. Raises as `joined_processes`."""
    given = {name: environment[name] for name in _PLAIN if name in environment}
    if "JAX_COORDINATOR_ADDRESS" in given and _count("OMPI_COMM_WORLD_SIZE", environment) > 1:
        ranks = {"JAX_NUM_PROCESSES": "OMPI_COMM_WORLD_SIZE", "JAX_PROCESS_ID": "OMPI_COMM_WORLD_RANK"}
        given = {name: environment[rank] for name, rank in ranks.items()} | given
    if given and len(given) < len(_PLAIN):
        missing = ", ".join(name for name in _PLAIN if name not in given)
        raise InputError(f"{', '.join(given)} is set without {missing}; set all three, or none for a single process")
    is_certain = bool(given) or _is_one_of_several(environment)
    if not is_certain and not _sees_tpus(environment):
        return None
    options: dict[str, object] = {}
    if given:
        try:
            count, number = int(given["JAX_NUM_PROCESSES"]), int(given["JAX_PROCESS_ID"])
        except ValueError as error:
            raise InputError(
                f"JAX_NUM_PROCESSES={given['JAX_NUM_PROCESSES']}, JAX_PROCESS_ID={given['JAX_PROCESS_ID']}: must be "
                "whole numbers"
            ) from error
        if not 0 <= number < count:
            raise InputError(f"JAX_PROCESS_ID={number}: must be in 0 to {count - 1} for JAX_NUM_PROCESSES={count}")
        if count == 1:
            return None
        if not re.fullmatch(".+:[0-9]{1,5}", given["JAX_COORDINATOR_ADDRESS"]):
            raise InputError(
                f"JAX_COORDINATOR_ADDRESS={given['JAX_COORDINATOR_ADDRESS']}: expected HOST:PORT of process 0, such as "
                "node0:12345"
            )
        options = {
            "coordinator_address": given["JAX_COORDINATOR_ADDRESS"], "num_processes": count, "process_id": number
        }  # fmt: skip
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM, which StopSignal does
    timeouts = {"heartbeat_timeout_seconds": _HEARTBEAT_SECONDS, "shutdown_timeout_seconds": _SHUTDOWN_SECONDS}
    try:
        jax.distributed.initialize(**timeouts, **options)  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        if not is_certain and isinstance(error, ValueError):  # TPUs of a single host that is not a Cloud TPU VM
            return None
        reason = str(error).strip().split("\n")[0]
        raise BertJaxError(f"the processes of the run could not connect: {reason}") from error
    if _has_host_alone(environment):  # JAX takes one GPU for each process of a launcher
        jax.config.update("jax_cuda_visible_devices", "all")
    if jax.process_count() == 1:
        return None
    if jax.default_backend() == "cpu":
        # XLA:CPU (jaxlib 0.10.2) forgets the order of independent collectives in a program that comes from JAX's cache,
        # and Gloo pairs them by their order: processes wait forever, abort, or exchange the wrong numbers.
        jax.config.update("jax_enable_compilation_cache", False)
    return distributed.global_state.client


def joined() -> tuple[int, int] | None:
    """Returns index and count of the processes of the run, None for a single one. Does not initialize JAX."""
    return _joined


def holds_devices() -> bool:
    """Returns whether JAX's backends are initialized, so that no child process can use the accelerator."""
    return xla_bridge.backends_are_initialized()


def is_first() -> bool:
    """Returns whether this is process 0, which writes metrics, config and info logs."""
    return jax.process_index() == 0


def process_number() -> int:
    """Returns the number of this process, 0 for a single one, without starting JAX's backend."""
    return distributed.global_state.process_id or 0


def wait_for_first() -> None:
    """Waits at a barrier until all processes have called it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("bert_jax")


def any_process(condition: bool) -> bool:
    """Returns, in all processes, whether `condition` holds in any; all have to call it."""
    if jax.process_count() == 1:
        return condition
    return bool(multihost_utils.process_allgather(np.array(condition)).any())


def ends_alone() -> bool:
    """Returns whether the failure of this process was reported, so that it must exit without JAX's shutdown barrier."""
    return _is_reported
