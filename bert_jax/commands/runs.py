"""`check`; `pretrain`, `finetune`, `study` and `compile`, which take a config; `report`, `configs` and `completion`."""

from collections.abc import Sequence
from typing import Annotated, Literal

from bert_jax import config_listing
from bert_jax.command_line.arguments import PATH, File, Folder, command, make_parsers
from bert_jax.commands import Result
from bert_jax.config_keys import FinetuneConfig, PretrainConfig, StudyConfig
from bert_jax.errors import InputError
from bert_jax.progress import Bars, silent
from bert_jax.runtime.interpreter import StopSignal
from bert_jax.sections import flatten


@command
def check(workdir: Folder | None = None) -> Result:
    """Checks in minutes that the devices of this machine or slice train, resume and agree.

    Reads: nothing
    Writes: nothing that it keeps

    Args:
      workdir: where runs and checkpoints are written, into a new folder that is removed; required with several
        processes, which must all see it; default: a temporary folder

    Examples:
      bert-jax check
      bert-jax check --workdir=runs
      bert-jax check --workdir=gs://bucket/runs --json
    """
    from bert_jax.device_check import check_devices

    found = check_devices(workdir)
    return Result(found, "\n".join(f"{name:<8} {text}" for name, text in found.items()))


@command
def pretrain(
    config: PretrainConfig, workdir: Folder | None = None, *, dry_run: bool = False,
    device: Annotated[str | None, "NAME"] = None,
    devices: Annotated[int | None, "N"] = None,
    mfu: Annotated[float, "SHARE"] = 1.0,
    stop: StopSignal | None = None, bars: Bars = silent,
) -> Result:  # fmt: skip
    """Pre-trains with MLM and NSP; run it again to resume.

    Reads: a config and prepared datasets
    Writes: DIR: config.json, checkpoints/STEP, metrics.jsonl, and TensorBoard's events

    Args:
      config: a config; --config.KEY=VALUE overrides its keys
      workdir: folder of checkpoints, metrics and curves; required to train
      dry_run: start nothing and write nothing: print sizes, FLOPs, tokens, memory, hours and checkpoints of the run
      device: dry_run: the device, such as v5e or h100; default: this one
      devices: dry_run: number of devices; default: those here, or 1
      mfu: dry_run: model FLOPs utilization, for the hours

    Examples:
      bert-jax pretrain --config=bert_base --workdir=runs/base --config.data.path=data
      bert-jax pretrain --config=bert_tiny --workdir=runs/try --config.data.path=data --config.total_steps=40
        --config.optimizer.warmup_steps=4
      bert-jax pretrain --config=bert_base --config.data.path=data --dry_run --device=v5e --devices=8
      bert-jax pretrain --config=continue --workdir=runs/domain --config.init=imported --config.data.path=data
    """
    if dry_run:
        from bert_jax.ahead_of_time.dry_run import plan_run
        from bert_jax.ahead_of_time.text import render

        plan = plan_run(config, workdir=workdir, device=device, devices=devices, mfu=mfu)
        return Result(plan, render(plan))
    if device or devices is not None or mfu != 1:
        raise InputError("device: expected only with dry_run, as devices and mfu; a run uses the machine's devices")
    if workdir is None:
        raise InputError("workdir: required to train; expected a folder, such as runs/tiny")
    from bert_jax.training import pretrain as training
    from bert_jax.training.checkpoints import open_checkpoint

    scores = training.pretrain(config, workdir, stop=stop, bars=bars)
    return Result({"workdir": workdir, "step": open_checkpoint(workdir).step, "eval": scores}, "")


@command
def finetune(config: FinetuneConfig, workdir: Folder, *, stop: StopSignal | None = None, bars: Bars = silent) -> Result:
    """Fine-tunes a checkpoint on a task and scores it; run it again to resume.

    Reads: a config, a checkpoint and the files of a task
    Writes: DIR: config.json, checkpoints/STEP, metrics.jsonl, result.json, and predictions/

    Args:
      config: finetune/glue:sst2, finetune/text, or a file; --config.KEY=VALUE overrides its keys
      workdir: checkpoints, metrics, scores and predictions

    Examples:
      bert-jax finetune --config=finetune/glue:sst2 --workdir=runs/sst2 --config.init=runs/base
        --config.data.path=glue/SST-2
      bert-jax finetune --config=finetune/text --workdir=runs/mine --config.init=runs/base
        --config.task.train=train.csv --config.task.dev=dev.csv
    """
    from bert_jax.finetuning import finetune as training

    return Result(training.finetune(config, workdir, stop=stop, bars=bars))


@command
def study(config: StudyConfig, /, workdir: Folder, *, stop: StopSignal | None = None, bars: Bars = silent) -> Result:
    """Pre-trains and fine-tunes every row of a table; run it again to resume.

    Reads: a config, prepared datasets and the files of tasks
    Writes: DIR: table.md, table.json, and the workdir of every run

    Args:
      config: studies/table5, or a file; --config.KEY=VALUE overrides its keys, --config.pretraining.KEY a key of every
        row's pre-training, --config.finetuning.KEY a key of every task
      workdir: folder of all runs' workdirs and of the table

    Examples:
      bert-jax study studies/table5 --workdir=runs/table5 --config.pretraining.data.path=data --config.task_data=tasks
      bert-jax study studies/table1 --workdir=runs/table1 --config.checkpoints.base=runs/base --config.task_data=tasks
    """
    from bert_jax.studies import study as studies

    table = studies.study(config, workdir, stop=stop, bars=bars)
    return Result(table.as_json(), studies.render(table).rstrip("\n"))


@command
def compile(
    config: PretrainConfig, *, topology: Annotated[str | None, "CHIP:A[xB[xC]]"] = None,
    num_slices: int = 1, phase: int | None = None, profile: bool = False,
) -> Result:  # fmt: skip
    """Compiles a config's training step ahead of time: memory, collectives, estimated time.

    Reads: a config, and the dataset's sizes if data.path is set
    Writes: nothing

    Args:
      config: a config of pretrain; data.path may be empty
      topology: a slice of TPUs, such as v5e:4x4 or v5p:2x2x2; default: the devices of this machine. In Python, JAX uses
        the CPU alone from then on
      num_slices: slices, connected by a slower network
      phase: compile one phase, numbered from 0; default: all
      profile: list the forty largest parts of a step's time by XLA's cost model

    Examples:
      bert-jax compile --config=bert_large:v5e --topology=v5e:4x4
      bert-jax compile --config=bert_base --topology=v5e:2x2 --profile --json
    """
    from bert_jax.ahead_of_time.compiled_step import compile_phases
    from bert_jax.ahead_of_time.text import render

    phases = list(compile_phases(config, topology, slices=num_slices, phase=phase, profile=profile))
    problems = "; ".join(phase["problem"] for phase in phases if phase["problem"])
    text = "\n\n".join(map(render, phases))
    return Result({"phases": phases}, text, error=InputError(problems) if problems else None)


@command
def report(workdir: Sequence[Annotated[str, "RUN", PATH]], /, output: File) -> Result:
    """Reports on one run, or on several side by side: curves and scores.

    Reads: the metrics of workdirs, and files of compile --json
    Writes: FILE, a page

    Args:
      workdir: a workdir of pretrain, finetune or study, a folder of workdirs, or a .json of compile --json
      output: a .html, which works offline

    Examples:
      bert-jax report runs/base --output=report.html
      bert-jax report runs/base runs/mine --output=report.html
    """
    from bert_jax.tracking.report import write_report

    results = write_report(workdir, output)
    return Result({"output": output, "workdirs": list(workdir), "results": results}, output)


@command
def configs(config: Annotated[str, "NAME|FILE.py[:ARG]"] | None = None, /) -> Result:
    """Lists the packaged configs, or prints the keys of one with values and comments.

    Reads: the packaged configs, or FILE.py
    Writes: nothing

    Args:
      config: a config; without it, all are listed

    Examples:
      bert-jax configs
      bert-jax configs bert_tiny
    """
    if config is None:
        found = {name: config_listing.docstring(name).partition("\n")[0] for name in config_listing.config_files()}
        return Result(found, "\n".join(f"{name:<21}  {text}" for name, text in found.items()))
    from bert_jax.config import load_config

    loaded = load_config(config, kind=None)
    comments = config_listing.key_comments(type(loaded))
    keys = {key: {"value": value, "comment": comments.get(key, "")} for key, value in flatten(loaded)}
    lines = [f"{key} = {of['value']!r}  # {of['comment']}" for key, of in keys.items()]
    return Result({"config": config, "keys": keys}, "\n".join([config_listing.docstring(config), "", *lines]))


@command
def completion(shell: Literal["bash", "zsh", "fish", "tcsh"], /) -> Result:
    """Prints the script that completes commands in a shell.

    Reads: nothing
    Writes: nothing

    Args:
      shell: the shell that reads the script

    Examples:
      bert-jax completion bash > ~/.local/share/bash-completion/completions/bert-jax.bash
    """
    import shtab

    script = shtab.complete(make_parsers()[0], shell)
    return Result({"shell": shell, "script": script}, script)
