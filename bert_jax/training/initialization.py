"""Start of a run from the parameters of the CHECKPOINT in `init`, and values that it decides.

New positions repeat the old ones, from the first: position P + i has the row of position i, as in Longformer (Beltagy
et al. 2020, arXiv:2004.05150, section 5). Attention to neighbours, which heads have learned from the differences of
rows, then works at once everywhere except next to multiples of P.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from bert_jax.config_keys import PretrainConfig
from bert_jax.data.dataset import DatasetInfo
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.model import abstract_parameters
from bert_jax.model.bert import Parameters, heads_of
from bert_jax.model.task_heads import model_settings
from bert_jax.sections import flatten, from_mapping, with_values
from bert_jax.training.checkpoints import Checkpoint, newest_intact, open_checkpoint, other_vocabulary_error
from bert_jax.training.checks import data_paths
from bert_jax.training.phases import Phase, plan_phases
from bert_jax.training.train_step import StateSpec, TrainState

log = logging.getLogger(__name__)

_LANGUAGE_MODELS = {False: "mlm", True: "ltr"}  # by `is_decoder`
# Fields in which the model may differ from the checkpoint: they change no shape and no meaning of a parameter.
_FREE = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "embedding_dropout", "attention_output_dropout",
    "mlp_dropout", "initializer_range", "depth_scaled_init", "classifier_pooling", "global_rope_theta",
    "local_rope_theta",
)  # fmt: skip


def open_init(phases: Sequence[Phase]) -> Checkpoint:
    """Opens the checkpoint that a run with these phases is initialized from, `init` of its config.

    The model may have more positions. Raises InputError if its vocabulary or sizes differ otherwise; and if it lacks a
    head that the run trains, and `init_missing_heads` is False.
    """
    config, model, dataset = phases[0].config, phases[0].model, phases[0].datasets[0]
    checkpoint = open_checkpoint(config.init)
    if checkpoint.tokenizer.sha256 != dataset.tokenizer.sha256:
        raise other_vocabulary_error(checkpoint, dataset)
    check_sizes(checkpoint, model.to_dict())
    trained = heads_of(model) if any(phase.config.objective.nsp for phase in phases) else ("mlm_head",)
    missing = [head for head in trained if head not in checkpoint.heads]
    if missing and not config.init_missing_heads:
        raise InputError(
            f"init={checkpoint.path}: has no {', '.join(missing)}; set init_missing_heads=True to initialize them "
            "randomly" + (", or objective.nsp=False" if "mlm_head" not in missing else "")
        )
    return checkpoint


def check_sizes(checkpoint: Checkpoint, sizes: Mapping[str, Any]) -> None:
    """Raises InputError if fields of BertConfig contradict those of the checkpoint in `init`."""
    saved = checkpoint.bert_config.to_dict()
    different = [
        f"objective.lm={_LANGUAGE_MODELS[saved[name]]} (here objective.lm={_LANGUAGE_MODELS[value]})"
        if name == "is_decoder" else f"{name}={saved[name]!r} (here model.{name}={value!r})"
        for name, value in sizes.items()
        if value != saved[name] and name not in _FREE
        and not (name == "max_position_embeddings" and value > saved[name])
    ]  # fmt: skip
    if different:
        raise InputError(f"init={checkpoint.path}: was trained with {', '.join(different)}; set the same values")


def initialize_from(checkpoint: Checkpoint, spec: StateSpec) -> TrainState:
    """Makes a new state with the checkpoint's parameters, at step 0 with zero moments.

    Parts that the checkpoint lacks, a head or a task's output, are initialized randomly. More positions than those of
    the checkpoint repeat them.
    """
    parts = spec.abstract.parameters
    shared = [part for part in parts if part in ("embeddings", "encoder", *checkpoint.heads)]
    shardings = {part: spec.shardings.parameters[part] for part in shared}
    table, before = parts["embeddings"].get("position"), checkpoint.bert_config.max_position_embeddings
    after = before if table is None else len(table)
    replicated = {"position": spec.shardings.step} if after > before else {}  # its rows may not be divisible
    placed = {**shardings, "embeddings": {**shardings["embeddings"], **replicated}}
    loaded = checkpoint.load_parameters(placed, parts=shared)
    log.info("Initialized from the parameters of %s", checkpoint.path)
    if "transform" in parts and (transform := _load_transform(checkpoint, spec)):
        loaded = {**loaded, "transform": transform}
    if after > before:
        loaded = repeat_positions(loaded, before, spec.abstract.parameters)
    if missing := [part for part in parts if part not in loaded]:
        log.info("Initialized randomly from the seed: %s", ", ".join(missing))
    return spec.make(loaded)


def repeat_positions(parameters: Parameters, trained: int, like: Parameters | None = None) -> Parameters:
    """Returns the parameters with position embeddings that repeat the `trained` first ones.

    Their number and sharding are those of `like`, parameters or their shapes; by default as before.
    """
    embeddings, table = parameters["embeddings"], (like or parameters)["embeddings"]["position"]
    log.info("Positions %d to %d start as copies of those from 0", trained, len(table) - 1)
    repeat = jax.jit(lambda rows: rows[jnp.arange(len(table)) % trained], out_shardings=table.sharding)
    return {**parameters, "embeddings": {**embeddings, "position": repeat(embeddings["position"])}}


def _load_transform(checkpoint: Checkpoint, spec: StateSpec) -> Parameters:
    """Loads the layers before a task's output, which start as another task's or the masked-LM head's; empty without.

    So they do in `transformers`.
    """
    shardings, settings = spec.shardings.parameters["transform"], model_settings(checkpoint.heads, checkpoint.task)
    shapes = abstract_parameters(checkpoint.bert_config, **settings)[1]
    part = next((part for part in ("transform", "mlm_head") if part in shapes), None)
    if part is None:
        return {}
    targets = {name: shardings.get(name, spec.shardings.step) for name in shapes[part]}  # output_bias is not kept
    loaded = checkpoint.load_parameters({part: targets}, parts=[part], **settings)[part]
    return {name: loaded[name] for name in shardings}


# --- Values of a config that a checkpoint decides: -1 for a number and "auto" for a text, as in configs/continue.py


def fill_in_from_checkpoint(config: PretrainConfig, workdir: epath.Path | None = None) -> PretrainConfig:
    """Returns the config with the sizes and the objective of the checkpoint in `init`, where it leaves them open.

    The sizes are those of the checkpoint, with as many positions as the longest sequence of the datasets if those are
    more. NSP is trained if the checkpoint has its head, and every dataset has pairs. A run that resumes in
    `workdir` has the values that it began with, and needs no `init`.

    Raises InputError if no checkpoint is given, for a value of the config that contradicts it, and if `workdir` holds a
    fine-tuning run.
    """
    before = newest_intact(workdir) if workdir is not None else None
    if before is not None:
        if before.task is not None:
            raise InputError(f"workdir={workdir}: holds a fine-tuning run; choose another folder")
        if not config.init:
            config = with_values(config, {"init": before.config["init"]})
    open_keys = [
        key for key, value in flatten(config)
        if value in (-1, "auto") and key.startswith(("model.", "objective.")) and key != "model.vocab_size"
    ]  # fmt: skip
    if not open_keys:
        return config
    if before is not None:
        saved = dict(flatten(from_mapping(type(config), before.config)))
        return with_values(config, {key: saved[key] for key in open_keys})
    if not config.init:
        raise InputError(
            f"init is not set, which {', '.join(open_keys[:3])}{' ...' if open_keys[3:] else ''} are taken from; pass "
            "init=CHECKPOINT, such as the output of `bert-jax import`"
        )
    checkpoint = open_checkpoint(config.init)
    given = {key: value for key, value in flatten(config.model) if f"model.{key}" not in open_keys}
    given.pop("vocab_size")
    if "objective.lm" not in open_keys:
        given["is_decoder"] = plan_phases(config)[0].config.objective.lm == "ltr"
    check_sizes(checkpoint, given)
    values = _checkpoint_values(checkpoint, config)
    filled = with_values(config, {key: values[key] for key in open_keys})
    log.info(
        "As in %s: %d layers of %d with %d heads, %d positions; objective.lm=%s, objective.nsp=%s",
        checkpoint.path, filled.model.num_hidden_layers, filled.model.hidden_size, filled.model.num_attention_heads,
        checkpoint.bert_config.max_position_embeddings, filled.objective.lm, filled.objective.nsp,
    )  # fmt: skip
    return filled


def _checkpoint_values(checkpoint: Checkpoint, config: PretrainConfig) -> dict[str, Any]:
    """Returns the values of all keys that a checkpoint may decide."""
    sizes = checkpoint.bert_config.to_dict()
    lm = "ltr" if sizes.pop("is_decoder") else "mlm"
    plans = plan_phases(config)
    paths = [path for plan in plans if plan.config.data.path for path in data_paths(plan.config)]
    datasets = [DatasetInfo.read(remote.parse_path(path)) for path in paths]
    lengths = [*(plan.config.data.seq_len for plan in plans), *(info.seq_len for info in datasets)]
    sizes["max_position_embeddings"] = max(sizes["max_position_embeddings"], *lengths)
    has_pairs = lm == "mlm" and all(info.options.get("pairs") != "none" for info in datasets)
    return {
        **{f"model.{name}": value for name, value in sizes.items()},
        "objective.lm": lm, "objective.nsp": has_pairs and {"pooler", "nsp_head"} <= {*checkpoint.heads},
    }  # fmt: skip
