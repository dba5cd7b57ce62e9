"""The processes of a run: one on a laptop, one a host on a pod, one a GPU or a node under Slurm."""

import glob
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
import numpy as np
from jax._src import distributed  # its client has no public name
from jax.experimental import multihost_utils

from bert_jax.errors import BertJaxError, InputError, Interrupted, NotBegun
from bert_jax.runtime.first_process import FirstProcessWatch
from bert_jax.runtime.heartbeats import AGAIN, PATIENCE_SECONDS, Peers, Store

log = logging.getLogger(__name__)

_told = False
_PLAIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_HEARTBEAT_SECONDS = 60  # that process 0 may be silent before the others give up; of theirs see `Peers`
_SHUTDOWN_SECONDS = 60  # that a process which is done waits for the others


def _is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Whether a launcher that JAX knows has started this process beside others."""
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        return True
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return True
    return "," in environment.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in environment


def _sees_tpus(environment: Mapping[str, str]) -> bool:
    """Whether this is a host of TPUs, one of several perhaps: a pod slice's hosts know each other from its metadata."""
    chips = [*glob.glob("/dev/accel[0-9]*"), *glob.glob("/dev/vfio/[0-9]*")]
    wanted = "tpu" in environment.get("JAX_PLATFORMS", "tpu")
    return wanted and bool(chips) and importlib.util.find_spec("libtpu") is not None


@contextmanager
def joined_processes(environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """With the other processes of the run, if there are any; before anything else is asked of JAX.

    Within, a process that is lost or fails ends all of them: an error that leaves this is told to the others, which
    end with its status, and they are watched. See `ends_alone` for how this process should end then.

    Plain variables (`JAX_COORDINATOR_ADDRESS` as HOST:PORT, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`) come first; Slurm,
    Open MPI, Cloud TPU and GKE are recognised by what they set, and JAX reads the rest from them.

    Raises InputError where some plain variables are set and others are not, or are no numbers, and BertJaxError where
    the others do not come.
    """
    global _told
    client = _join(environment)
    if client is None:
        yield
        return
    number, count = jax.process_index(), jax.process_count()
    if not is_first():
        logging.getLogger("bert_jax").setLevel(logging.WARNING)
    log.info("process %d of %d", number, count)
    peers = Peers(client, number, count)
    watch = _watch_first(peers) if number else None
    try:
        yield
    except BaseException as caught:
        error = _as_lost(caught)
        if watch and error is caught:  # else process 0 may be the lost one: the watch would say so
            watch.close()
        # Those that stop together do so by themselves, each with all of it on disk.
        if not isinstance(error, Interrupted) or isinstance(error, NotBegun):
            message = " ".join(str(error).split()) or type(error).__name__
            peers.report(getattr(error, "exit_status", BertJaxError.exit_status), f"ended the run: {message}")
            _told = True
        else:
            peers.close()
        if error is caught:
            raise
        raise error from caught
    if watch:
        watch.close()
    peers.close()


def _watch_first(peers: Peers) -> FirstProcessWatch:
    address = distributed.global_state.coordinator_address
    assert address is not None
    return FirstProcessWatch(address, peers.silence, patience=PATIENCE_SECONDS, advice=AGAIN)


def _as_lost(error: BaseException) -> BaseException:
    """What a collective says when a process at its other end is gone, in a line."""
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" in str(error):
        return error
    reason = str(error).strip().split("\n")[0]
    return BertJaxError(f"could not go on, as where another process is lost: {AGAIN} ({reason})")


def _join(environment: Mapping[str, str]) -> Store | None:
    """Where the processes tell each other things; None if there is but this one. Raises as `joined_processes` does."""
    given = {name: environment[name] for name in _PLAIN if name in environment}
    if given and len(given) < len(_PLAIN):
        missing = ", ".join(name for name in _PLAIN if name not in given)
        raise InputError(f"{', '.join(given)} without {missing}: set all three, or none on a single process")
    is_certain = bool(given) or _is_one_of_several(environment)
    if not is_certain and not _sees_tpus(environment):
        return None
    options: dict[str, object] = {}
    if given:
        try:
            count, number = int(given["JAX_NUM_PROCESSES"]), int(given["JAX_PROCESS_ID"])
        except ValueError as error:
            raise InputError(f"JAX_NUM_PROCESSES and JAX_PROCESS_ID have to be whole numbers: {error}") from error
        if not 0 <= number < count:
            raise InputError(f"JAX_PROCESS_ID={number} has to be in 0 to {count - 1}, for JAX_NUM_PROCESSES={count}")
        if count == 1:
            return None
        options = {
            "coordinator_address": given["JAX_COORDINATOR_ADDRESS"], "num_processes": count, "process_id": number
        }  # fmt: skip
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself: see StopSignal
    timeouts = {"heartbeat_timeout_seconds": _HEARTBEAT_SECONDS, "shutdown_timeout_seconds": _SHUTDOWN_SECONDS}
    try:
        jax.distributed.initialize(**timeouts, **options)  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        if not is_certain and isinstance(error, ValueError):  # TPUs of a single host that is no Cloud TPU VM
            return None
        reason = str(error).strip().split("\n")[0]
        raise BertJaxError(f"the processes of the run did not find each other: {reason}") from error
    return distributed.global_state.client if jax.process_count() > 1 else None


def is_first() -> bool:
    """Whether this is the process that writes what there is to be one of: metrics, config, lines for people."""
    return jax.process_index() == 0


def wait_for_first() -> None:
    """Waits until the first process has come here, and the others have."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("bert_jax")


def any_process(condition: bool) -> bool:
    """Returns whether `condition` holds in any process, in all of them; all have to call it."""
    if jax.process_count() == 1:
        return condition
    return bool(multihost_utils.process_allgather(np.array(condition)).any())


def ends_alone() -> bool:
    """Whether the others know that this process ends, and do not wait for it; JAX's own way out would for them."""
    return _told
