"""Processes of a run: one on a laptop, one per host on a TPU pod, one per GPU or node under Slurm."""

import glob
import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
import numpy as np
from jax._src import distributed, xla_bridge  # the client and the state of the backends have no public name
from jax.experimental import multihost_utils

from bert_jax.errors import BertJaxError, InputError, Interrupted, NotBegun
from bert_jax.runtime.first_process import DelayedAborts, FirstProcessWatch
from bert_jax.runtime.heartbeats import PATIENCE_SECONDS, RESTART_ADVICE, Peers, Store

log = logging.getLogger(__name__)

_is_reported = False
_joined: tuple[int, int] | None = None
_PLAIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Without an answer before JAX aborts processes. Its heartbeats are half as far apart, so that it finds a lost process
# after 60 s at the earliest: later than `Peers`, which names it.
_HEARTBEAT_SECONDS = 120
_SHUTDOWN_SECONDS = 60  # that a finished process waits for the others


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

    Inside, a process that is lost or fails ends all of them: an error that leaves this context is reported to the
    others, which end with its status. See `ends_alone` for how this process should end then.

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
    peers = Peers(client, number, count)
    watch = _watch_first(peers) if number else None
    aborts = None if number else DelayedAborts()
    try:
        yield
    except BaseException as caught:
        error = _convert_collective_error(caught)
        if error is not caught:
            peers.wait_for_reason()
        if watch and error is caught:  # otherwise process 0 may be lost, which the watch would report
            watch.close()
        # After a stop signal all processes end by themselves, with the state on disk.
        if not isinstance(error, Interrupted) or isinstance(error, NotBegun):
            message = " ".join(str(error).split()) or type(error).__name__
            peers.report(getattr(error, "exit_status", BertJaxError.exit_status), f"ended the run: {message}")
            _is_reported = True
        else:
            peers.close()
        if error is caught:
            raise
        raise error from caught
    finally:
        if aborts:
            aborts.close()
    if watch:
        watch.close()
    peers.close()


def _watch_first(peers: Peers) -> FirstProcessWatch:
    address = distributed.global_state.coordinator_address
    assert address is not None
    return FirstProcessWatch(address, peers.silence, patience=PATIENCE_SECONDS, advice=RESTART_ADVICE)


def _convert_collective_error(error: BaseException) -> BaseException:
    """Converts the JaxRuntimeError of a failed collective to a one-line error."""
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" in str(error):
        return error
    reason = str(error).strip().split("\n")[0]
    return BertJaxError(f"a collective failed, probably because another process is lost: {RESTART_ADVICE} ({reason})")


def _join(environment: Mapping[str, str]) -> Store | None:
    """Returns the key-value store that the processes share, None for a single one. Raises as `joined_processes`."""
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
