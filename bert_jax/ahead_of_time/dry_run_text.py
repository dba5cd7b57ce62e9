"""Renders the plan of a run as text."""

from collections.abc import Mapping
from typing import Any

from bert_jax.ahead_of_time.table import gib


def render_plan(plan: Mapping[str, Any]) -> str:
    """Renders the result of `plan_run`."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan["mesh"].items() if size > 1) or "one device"
    lines = [
        f"model: {plan['parameters']:,} parameters, computed in {plan['dtype']}",
        f"devices: {plan['devices']:,} x {plan['device']}, {mesh}",
        *(f"  mesh axis {axis}: {networks}" for axis, networks in plan["networks"].items()),
        f"run: {plan['total_steps']:,} steps, {plan['total_tokens']:,} tokens, {plan['total_model_flops']:.3g} model "
        "FLOPs" + (f"; resumes after step {plan['resumes_after_step']:,}" if plan["resumes_after_step"] else ""),
    ]
    for phase in plan["phases"]:
        lines += ["", *_phase(phase)]
    return "\n".join([*lines, "", *_memory(plan), "", *_hours(plan), "", *_checkpoints(plan), "", *_changed(plan)])


def _phase(phase: Mapping[str, Any]) -> list[str]:
    first, last = phase["steps"]
    count = phase["gradient_accumulation"]
    microbatches = f" in each of {count:,} microbatches" if count > 1 else ""
    evaluations = f"{phase['evaluations']:,} evaluations of {phase['eval_batches']:,} batches"
    return [
        f"steps {first:,}-{last:,}: {phase['global_batch_size']:,} rows of {phase['seq_len']} tokens, "
        f"{phase['rows_per_device']:,} per device{microbatches}",
        f"  {phase['tokens_per_step']:,} tokens per step, {phase['real_token_share']:.1%} of them real; up to "
        f"{phase['predictions_per_row']} predictions per row",
        f"  {phase['model_flops_per_step']:.4g} model FLOPs per step, and {phase['recomputed_flops_per_step']:.3g} "
        "recomputed by remat",
        f"  learning rate {phase['learning_rate']:g} after {phase['warmup_steps']:,} steps of warm-up",
        f"  {evaluations if phase['eval_batches'] else 'no evaluation: no eval split, or eval_batches=0'}",
        *(
            f"  {dataset['path']}: {dataset['examples']:,} examples, {dataset['epochs']:.3g} epochs"
            for dataset in phase["datasets"]
        ),
    ]


def _memory(plan: Mapping[str, Any]) -> list[str]:
    memory = plan["memory_bytes"]
    known = [(part, size) for part, size in memory.items() if size is not None]
    return [
        "memory per device, GiB",
        *(f"  {part:<11} {gib(size):>8}" for part, size in known),
        f"  {'sum':<11} {gib(sum(size for _, size in known)):>8}",
        "  activations are not known before compilation; bert-jax compile computes them",
    ]


def _hours(plan: Mapping[str, Any]) -> list[str]:
    hours, measured = plan["hours"], plan["hours"]["measured"]
    lines = ["time of the steps that are left, without compilation, evaluation and saves"]
    if hours["roofline"] is None:
        lines.append(
            f"  the rates of {plan['device']} are unknown; name a device, such as --device=v5e or --device=h100"
        )
    else:
        lines.append(f"  at least {_duration(hours['roofline'])}, by the roofline at the device's peak")
    if hours["given_mfu"] is not None:
        lines.append(f"  {_duration(hours['given_mfu'])} at the given MFU of {hours['mfu']:.1%}")
    elif hours["roofline"] is not None:
        lines.append("  --mfu=0.4 adds an estimate at an MFU of 40%")
    elif hours["mfu"] is not None:
        lines.append("  --mfu has no effect without a device of known peak")
    if measured:
        where = f"steps {measured['steps'][0]:,}-{measured['steps'][1]:,} of the workdir"
        if hours["measured_mfu"] is not None:
            duration = _duration(hours["measured_mfu"])
            lines.append(f"  {duration} at the MFU of {measured['mfu']:.1%} measured in {where}")
        lines.append(
            f"  {_duration(hours['measured_rate'])} on the devices of {where}: measured "
            f"{measured['tokens_per_second']:,.0f} tokens/s"
        )
    return lines


def _duration(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} hours"
    return f"{60 * hours:.1f} minutes" if hours >= 1 / 60 else f"{3600 * hours:.1f} seconds"


def _checkpoints(plan: Mapping[str, Any]) -> list[str]:
    found = plan["checkpoints"]
    when, kept = f"every {found['every_steps']:,} steps", f"the newest {found['kept']} are kept"
    if found["milestones"]:
        when, kept = f"{when} and at milestones", f"{found['kept']:,} are kept, {found['milestones']:,} as milestones"
    return [
        f"checkpoints: {gib(found['bytes'])} GiB each, {found['saves']:,} saves, {when}; {kept}, "
        f"{gib(found['kept_bytes'])} GiB"
    ]


def _changed(plan: Mapping[str, Any]) -> list[str]:
    if not plan["changed"]:
        return ["config: all values are the defaults"]
    width = max(len(one["key"]) for one in plan["changed"])
    return [
        "config, where it differs from --config=default",
        *(f"  {one['key']:<{width}}  {one['value']!r} instead of {one['default']!r}" for one in plan["changed"]),
    ]
