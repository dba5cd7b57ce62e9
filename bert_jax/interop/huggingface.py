"""Export of a folder for `transformers` and for its Hub: weights, config, tokenizer and model card."""

import json
import logging
import os
import re
from collections.abc import Collection, Mapping
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
from bert_jax.interop.model_card import CARD, Publication, model_card, read_results
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
        return revision_name(self.step)


def revision_name(step: int) -> str:
    """Returns the name of a step's revision on the Hub."""
    return f"step{step}"


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
        raise InputError(f"--output={output!r}: is no folder; expected a new folder, or that of an earlier export")
    targets = {step: folder / revision_name(step) for step in chosen_steps(workdir, steps)}
    # All checks come first. Each checkpoint is opened twice, so that thousands of tokenizers are not held at once.
    complete = {step for step, target in targets.items() if _is_export_of(open_checkpoint(workdir, step), target)}
    _check_one_run(workdir, folder, complete)
    revisions: list[Revision] = []
    for step, target in targets.items():
        if step in complete:
            log.info("%s is complete and is kept, with its model card", target)
            (architecture,) = read_json(target / CONFIG)["architectures"]
        else:
            checkpoint = open_checkpoint(workdir, step)
            architecture = _export(checkpoint, target, publication, folder.name, revision_name(step))
        revisions.append(Revision(step, str(target), architecture, step not in complete))
    return revisions


def _is_export_of(checkpoint: Checkpoint, folder: epath.Path) -> bool:
    """Returns whether a folder has the complete export of a checkpoint; False for a new or an empty folder.

    An upload to a store that was interrupted is not complete. InputError if the folder holds anything else.
    """
    if not remote.is_taken(folder):
        return False
    if not remote.exists(folder / CONFIG) and remote.is_remote(folder):
        return False
    reference, found = checkpoint.reference(), _exported_checkpoint(folder)
    keys = ("step", "digest") if reference["digest"] else ("step", "path")
    if found is None or any(found.get(key) != reference[key] for key in keys):
        raise InputError(f"{folder}: already exists, and is not the export of {checkpoint.path}; choose another folder")
    return True


def _exported_checkpoint(folder: epath.Path) -> dict[str, Any] | None:
    """Returns the `Checkpoint.reference` in the provenance of an export; None without one."""
    path = folder / provenance.FILE
    found = read_json(path).get("runs", [{}])[-1].get("inputs", {}).get("checkpoint") if remote.exists(path) else None
    return found if isinstance(found, dict) else None


def _check_one_run(workdir: str, output: epath.Path, complete: Collection[int]) -> None:
    """Raises InputError if `output` has the revision of a step of another run than that of `workdir`.

    `complete` are steps whose revisions were compared before. A step that the workdir has is compared by its digest,
    for a workdir may be moved. A step that it no longer has must be from the same path as one of these.
    """
    folders = remote.children(output)
    named = {int(child.name.removeprefix("step")): child for child in folders if _REVISION.fullmatch(child.name)}
    exported = {step: found for step, child in named.items() if (found := _exported_checkpoint(child))}
    kept = exported.keys() & set(chosen_steps(workdir, "all"))
    for step in kept - set(complete):
        _is_export_of(open_checkpoint(workdir, step), named[step])
    same = {str(remote.absolute(workdir)), *(_workdir_of(exported[step]) for step in kept)}
    for step in sorted(exported.keys() - kept):
        if (other := _workdir_of(exported[step])) not in same:
            raise InputError(f"{named[step]}: is of the run in {other}, not of {workdir}; choose another folder")


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
        "dtype": "float32", **(task_config({**task, **_null_threshold(checkpoint)}) if task else {}),
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


def _null_threshold(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the odds above which SQuAD 2.0 has no answer, which the run tuned on its first scored split."""
    if (checkpoint.task or {})["name"] != "squad/2.0":
        return {}
    first = next((metrics for _, metrics in read_results(checkpoint)), {})
    return {"null_threshold": first["best_f1_thresh"]} if "best_f1_thresh" in first else {}
