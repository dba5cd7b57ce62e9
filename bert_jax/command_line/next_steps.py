"""The commands that usually follow a command, and use its results."""

import argparse
import shlex
from collections.abc import Callable

_POSITIONS = 512  # of bert_tiny


def _quoted(value: str) -> str:
    """Quotes a value for the shell; a path that begins with "-" would be an option."""
    return shlex.quote(f"./{value}" if value.startswith("-") and value != "-" else value)


def _vocab(options: argparse.Namespace) -> list[str]:
    corpus = " ".join(map(_quoted, options.input or ["text/*.txt"]))
    return [f"bert-jax prepare --input {corpus} --vocab {_quoted(options.output)} --output data"]


def _prepare(options: argparse.Namespace) -> list[str]:
    return [f"bert-jax inspect {_quoted(options.output)}", *_pretrain(options.output)]


def _pretrain(data: str) -> list[str]:
    from bert_jax.data.dataset import DatasetInfo
    from bert_jax.files import remote

    if "," in data or data != data.strip():  # a key with several paths cannot name it
        return []
    info = DatasetInfo.read(remote.parse_path(data))
    settings = [f"--config.data.path={_quoted(data)}"]
    if info.options.get("pairs") == "none":
        settings.append("--config.objective.nsp=False")
    if info.seq_len > _POSITIONS:
        settings.append(f"--config.model.max_position_embeddings={info.seq_len}")
    return [f"bert-jax pretrain --config=bert_tiny --workdir=runs/tiny {' '.join(settings)}"]


def _predict(options: argparse.Namespace) -> list[str]:
    return [f"bert-jax evaluate --checkpoint={_quoted(options.checkpoint)} --data=FILE"]


def _evaluate(options: argparse.Namespace) -> list[str]:
    return [f"bert-jax export --checkpoint={_quoted(options.checkpoint)} --output=hf"]


def _export(options: argparse.Namespace) -> list[str]:
    if options.format != "hf":
        return []  # the README in the folder has the program that loads it
    program = f"from transformers import AutoModel; print(AutoModel.from_pretrained({options.output!r}))"
    return [f"python -c {shlex.quote(program)}"]


def _import(options: argparse.Namespace) -> list[str]:
    place = _quoted(options.output)
    init = f"--workdir=WORKDIR --config.init={place}"
    return [
        f"bert-jax finetune --config=finetune/glue:TASK {init} --config.data.path=FOLDER",
        f"bert-jax prepare --input 'text/*.txt' --vocab {place} --output=DATASET",
        f"bert-jax pretrain --config=continue {init} --config.data.path=DATASET",
    ]


def _inspect(options: argparse.Namespace) -> list[str]:
    return _pretrain(options.data)


def _compile(options: argparse.Namespace) -> list[str]:
    return [f"bert-jax pretrain --config={_quoted(options.config)} --workdir=WORKDIR{_overrides(options)}"]


def _overrides(options: argparse.Namespace) -> str:
    return "".join(f" {shlex.quote(f'--config.{key}={value}')}" for key, value in options.overrides)


NEXT_STEPS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "vocab": _vocab, "prepare": _prepare, "inspect": _inspect, "predict": _predict, "evaluate": _evaluate,
    "export": _export, "import": _import, "compile": _compile,
}  # fmt: skip
"""By command. `pretrain` and `finetune` log theirs when a run is finished."""
