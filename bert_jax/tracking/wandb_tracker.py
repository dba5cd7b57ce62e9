"""Weights & Biases: scalars, hyper-parameters and text samples of a run, by the package `wandb` (extra `wandb`)."""

import importlib.util
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.extras import install_hint
from bert_jax.files import atomic, remote
from bert_jax.tracking.tracker import RunRecord, Sample, Tracker

log = logging.getLogger(__name__)

WANDB_FILE = "wandb.json"
"""Names the run in W&B, so that a resumed run continues it."""


def check_wandb(project: str) -> None:
    """Raises InputError if a project is set and the package `wandb` is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise InputError(f"tracking.wandb_project={project}: requires the package wandb; run: {install_hint('wandb')}")


class WeightsAndBiases(Tracker):
    """Logs to a project of W&B. A resumed run continues its run there, which keeps the first value of a step.

    The environment variables of W&B apply: WANDB_MODE=offline writes to the workdir, for `wandb sync`.
    """

    def __init__(self, project: str, entity: str, workdir: epath.Path):
        """Opens the run. Raises InputError if W&B refuses it, such as without a login."""
        import wandb

        identity = _identity(workdir / WANDB_FILE, project, entity)
        try:
            self._run = wandb.init(
                project=project,
                entity=entity or None,
                id=identity,
                name=workdir.name,
                dir=None if remote.is_remote(workdir) else str(workdir),
                resume="allow",
                reinit="create_new",  # leaves a run of the calling program alone
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.UsageError as error:
            raise InputError(
                f"tracking.wandb_project={project}: {error}; run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        log.info("Weights & Biases: %s", f"offline, in {self._run.dir}" if self._run.offline else self._run.url)

    def log_config(self, run: RunRecord) -> None:
        self._run.config.update(dict(run.config), allow_val_change=True)

    def log_scalars(self, step: int, values: Mapping[str, Any], *, split: str | None, time: float) -> None:
        self._run.log({f"{split or 'train'}/{name}": value for name, value in values.items()}, step=step)

    def log_samples(self, step: int, samples: Sequence[Sample], *, time: float) -> None:
        import wandb

        table = wandb.Table(columns=["step", "text", "target", "probability", "fills"])
        for sample in samples:
            for mask in sample["masks"]:
                fills = ", ".join(f"{word} {probability:.3f}" for word, probability in mask["fills"])
                table.add_data(step, sample["text"], mask["target"], mask["probability"], fills)
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


def _identity(path: epath.Path, project: str, entity: str) -> str:
    """Returns the id of the workdir's run in the project, a new one at first."""
    place = {"project": project, "entity": entity}
    before = json.loads(atomic.read_whole(path)) if remote.exists(path) else {}
    if {key: before.get(key) for key in place} == place:
        return str(before["id"])
    identity = secrets.token_hex(8)
    atomic.write_whole(path, (json.dumps({"id": identity, **place}) + "\n").encode())
    return identity
