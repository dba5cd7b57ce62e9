"""Export of a folder for `transformers` and for its Hub: weights, config, tokenizer and model card."""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etils import epath
from safetensors.numpy import save_file

from bert_jax.errors import InputError
from bert_jax.files import provenance, remote
from bert_jax.files.atomic import new_folder, whole_folder
from bert_jax.interop.architectures import ARCHITECTURES, architecture_of, task_config
from bert_jax.interop.huggingface_reading import CONFIG
from bert_jax.interop.huggingface_weights import layout, model_settings, state_dict
from bert_jax.interop.model_card import CARD, Publication, model_card
from bert_jax.interop.weight_files import WHOLE, read_json
from bert_jax.model.task_heads import TaskHead
from bert_jax.text.conversion import VOCABULARY
from bert_jax.training.checkpoints import Checkpoint, check_finite, chosen_steps, open_checkpoint

log = logging.getLogger(__name__)

_REVISION = re.compile(r"step\d+")


@dataclass(frozen=True)
class Revision:
    """An exported step of a run: `step1000`, as revisions of models on the Hub are named.

    `is_new` is False if the folder was complete before.
    """

    step: int
    folder: str
    architecture: str
    is_new: bool

    @property
    def name(self) -> str:
        """The name of the folder and of the revision."""
        return f"step{self.step}"


def export_steps(
    workdir: str, output: str, steps: str, publication: Publication | None = None
) -> list[Revision]:  # fmt: skip
    """Exports steps of a workdir to `output`/stepN, each as `export` does; returns them in ascending order.

    Skips the folder of a step that is complete, and checks that it is of the same checkpoint.

    Args:
      workdir: a workdir of pre-training or fine-tuning.
      output: a folder, new or of an earlier call.
      steps: "all", or step numbers such as "0,1000".
      publication: as for `export`.

    Raises:
      InputError: a step is not in the workdir, its folder holds anything else, or `output` has steps of another run;
        then nothing is written.
    """
    folder = remote.parse_path(output)
    if not output or (remote.exists(folder) and not folder.is_dir()):
        raise InputError(f"output={output!r}: is no folder; expected a new folder, or that of an earlier export")
    steps_chosen = chosen_steps(workdir, steps)
    complete = _complete_steps(workdir, folder)  # before anything is written
    revisions: list[Revision] = []
    for step in steps_chosen:
        target = folder / f"step{step}"
        if step in complete:
            log.info("%s is complete and is kept, with its model card", target)
            (architecture,) = read_json(target / CONFIG)["architectures"]
        else:
            checkpoint = open_checkpoint(workdir, step)
            architecture = _export(checkpoint, target, publication, folder.name, target.name)
        revisions.append(Revision(step, str(target), architecture, step not in complete))
    return revisions


def _complete_steps(workdir: str, output: epath.Path) -> set[int]:
    """Returns the steps of a workdir whose exports in `output` are complete.

    A folder of a step that the workdir has must be the export of this checkpoint, by its digest, for a workdir may be
    moved. That of another step must be from the same path as one of these. Raises InputError for any other.
    """
    children = [
        child for child in remote.children(output) if _REVISION.fullmatch(child.name) and remote.is_taken(child)
    ]
    if remote.is_remote(output):  # where an upload that was interrupted lacks the config, which is written last
        children = [child for child in children if remote.exists(child / CONFIG)]
    folders = {int(child.name.removeprefix("step")): child for child in children}
    kept = folders.keys() & set(chosen_steps(workdir, "all"))
    exported = {step: _exported_checkpoint(child) for step, child in folders.items()}
    for step in sorted(kept):
        reference = open_checkpoint(workdir, step).reference()
        if any(exported[step].get(key) != reference[key] for key in ("step", "digest")):
            raise InputError(
                f"{folders[step]}: already exists, and is not the export of {reference['path']}; choose another folder"
            )
    same = {str(remote.absolute(workdir)), *(_workdir_of(exported[step]) for step in kept)}
    for step in sorted(folders.keys() - kept):
        if exported[step] and (other := _workdir_of(exported[step])) not in same:
            raise InputError(f"{folders[step]}: is of the run in {other}, not of {workdir}; choose another folder")
    return kept


def _exported_checkpoint(folder: epath.Path) -> dict[str, Any]:
    """Returns the `Checkpoint.reference` in the provenance of an export; {} without one."""
    path = folder / provenance.FILE
    found = read_json(path).get("runs", [{}])[-1].get("inputs", {}).get("checkpoint") if remote.exists(path) else None
    return found if isinstance(found, dict) else {}


def _workdir_of(reference: Mapping[str, Any]) -> str:
    """Returns the workdir of a step's `Checkpoint.reference`."""
    return str(epath.Path(reference["path"]).parent.parent)


def export(checkpoint: Checkpoint, output: str, publication: Publication | None = None) -> str:
    """Writes `config.json`, `model.safetensors`, the tokenizer's files, a model card and the provenance to `output`.

    Returns the name of the class; see `architecture_of`. The folder is written atomically.

    Raises InputError if `output` is a file or a folder that is not empty, and as `architecture_of` does.
    """
    folder = new_folder(output)
    return _export(checkpoint, folder, publication, folder.name)


def _export(
    checkpoint: Checkpoint, folder: epath.Path, publication: Publication | None, name: str, revision: str = ""
) -> str:
    """Writes the folder of `export`, whose model card has the title `name`."""
    log.info("Reading %s and writing %s", checkpoint.path, folder)
    config, tokenizer, task = checkpoint.bert_config, checkpoint.tokenizer, checkpoint.task
    architecture = architecture_of(checkpoint)
    heads = [head for head in ARCHITECTURES[architecture].heads if head in checkpoint.heads]
    if dropped := [head for head in checkpoint.heads if head not in heads]:
        log.warning("%s does not support these heads, which are not exported: %s", architecture, ", ".join(dropped))
    if task is None and not heads:
        log.warning("Exported without a pooler; load it with BertModel.from_pretrained(..., add_pooling_layer=False)")
    parameters = checkpoint.load_parameters(**model_settings(checkpoint.heads, task))
    check_finite(checkpoint, parameters)
    outputs = TaskHead.from_dict(task).outputs if task else 0
    weights = state_dict(parameters, layout(config, architecture, heads, outputs))
    longest = task["max_seq_len"] if task else config.max_position_embeddings
    described = {
        "architectures": [architecture], "model_type": "bert", **config.to_dict(), "pad_token_id": tokenizer.pad_id,
        "dtype": "float32", **(task_config(task) if task else {}),
    }  # fmt: skip
    card = model_card(
        checkpoint, architecture, name, publication or Publication(), revision=revision,
        parameters=sum(value.size for value in weights.values()),
    )  # fmt: skip
    with whole_folder(folder, last=CONFIG) as partial:  # a remote folder with the config is complete
        tokenizer.save(partial, model_max_length=longest)
        if tokenizer.kind == "wordpiece" and "" not in tokenizer.vocab:  # for BertTokenizer of version 4, and others
            (partial / VOCABULARY).write_text("".join(f"{piece}\n" for piece in tokenizer.vocab), encoding="utf-8")
        (partial / CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
        (partial / CARD).write_text(card, encoding="utf-8")
        save_file(weights, str(partial / WHOLE), metadata={"format": "pt"})
        os.chmod(partial / WHOLE, os.stat(partial / CONFIG).st_mode & 0o777)  # save_file makes it 0600
        provenance.append(partial, provenance.record({"checkpoint": checkpoint.reference()}))
    return architecture
