"""`check`, and `pretrain`, `finetune`, `study` and `compile`, which take a config."""

import argparse
import json
import signal
from dataclasses import asdict

from bert_jax.command_line.command_results import print_result, suggest
from bert_jax.command_line.console import bars, set_up_logging
from bert_jax.errors import BertJaxError, InputError
from bert_jax.progress import silent


def run_check(options: argparse.Namespace) -> None:
    """Runs `bert-jax check`. Raises BertJaxError if a part failed."""
    from bert_jax.runtime.processes import is_first, joined_processes

    with joined_processes():
        from bert_jax.device_check import check_devices

        set_up_logging(quiet=True)  # the tiny runs log as runs do
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: the folder is removed
        parts = []
        for part in check_devices(options.workdir):
            parts.append(asdict(part))
            if is_first() and not options.json:
                print(
                    f"{'ok' if part.ok else 'FAILED':<8}{part.name:<10}{part.seconds:>6.1f} s  {part.message}",
                    flush=True,
                )
        failed = [part["name"] for part in parts if not part["ok"]]
        if is_first() and options.json:
            print(json.dumps({"ok": not failed, "parts": parts}, indent=2))
    if failed:
        raise BertJaxError(f"failed: {', '.join(failed)} ({len(failed)} of {len(parts)} parts)")


def run_pretrain(options: argparse.Namespace) -> None:
    """Runs `bert-jax pretrain`."""
    if options.dry_run:
        _dry_run(options)
        return
    from bert_jax.runtime.preemption import StopSignal

    with StopSignal() as stop:  # before the imports, which take seconds: a signal during them stops the run
        from bert_jax.config import load_config
        from bert_jax.runtime.processes import is_first, joined_processes
        from bert_jax.tracking.metrics import finite_json
        from bert_jax.training.pretrain import pretrain

        with joined_processes():
            progress = bars(quiet=options.quiet) if is_first() else silent
            config = load_config(options.config, options.overrides)
            scores = pretrain(config, options.workdir, stop=stop, bars=progress)
            if is_first() and options.json:
                print(finite_json({"workdir": options.workdir, "step": config.total_steps, "eval": scores}, indent=2))


def _dry_run(options: argparse.Namespace) -> None:
    from bert_jax.ahead_of_time.dry_run import plan_run
    from bert_jax.ahead_of_time.text import render
    from bert_jax.config import load_config
    from bert_jax.tracking.metrics import finite_json

    plan = plan_run(
        load_config(options.config, options.overrides), workdir=options.workdir, device=options.device,
        devices=options.devices, mfu=1.0 if options.mfu is None else options.mfu,
    )  # fmt: skip
    print(finite_json(plan, indent=2) if options.json else render(plan))


def run_finetune(options: argparse.Namespace) -> None:
    """Runs `bert-jax finetune`."""
    from bert_jax.runtime.preemption import StopSignal

    with StopSignal() as stop:
        from bert_jax.config import FinetuneConfig, load_config
        from bert_jax.finetuning.finetune import finetune
        from bert_jax.finetuning.results import unscored
        from bert_jax.runtime.processes import is_first, joined_processes
        from bert_jax.tracking.metrics import finite_json

        with joined_processes():
            progress = bars(quiet=options.quiet) if is_first() else silent
            strict = [("data.strict", "True")] if options.strict else []
            config = load_config(options.config, [*options.overrides, *strict], kind=FinetuneConfig)
            scores = finetune(config, options.workdir, stop=stop, bars=progress)
            if is_first():
                print(finite_json(scores or unscored(options.workdir), indent=2))


def run_study(options: argparse.Namespace) -> None:
    """Runs `bert-jax study`."""
    from bert_jax.runtime.preemption import StopSignal

    with StopSignal() as stop:
        from bert_jax.runtime.processes import is_first, joined_processes
        from bert_jax.studies.study import load_study, study
        from bert_jax.studies.study_table import render

        with joined_processes():
            progress = bars(quiet=options.quiet) if is_first() else silent
            table = study(load_study(options.config, options.overrides), options.workdir, stop=stop, bars=progress)
            if is_first():
                print_result(options, table.as_json(), render(table).rstrip("\n"))


def run_compile(options: argparse.Namespace) -> None:
    """Runs `bert-jax compile`."""
    from bert_jax.ahead_of_time.compiled_step import compile_phases
    from bert_jax.ahead_of_time.text import render
    from bert_jax.config import load_config

    phases = []
    for phase in compile_phases(
        load_config(options.config, options.overrides), options.topology, slices=options.num_slices,
        phase=options.phase, profile=options.profile,
    ):  # fmt: skip
        phases.append(phase)
        if not options.json:
            print(render(phase), end="\n\n", flush=True)
    if options.json:
        print(json.dumps({"phases": phases}, indent=2))
    if problems := [phase["problem"] for phase in phases if phase["problem"]]:
        raise InputError("; ".join(problems))
    suggest(options)
