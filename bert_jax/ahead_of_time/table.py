"""Renders descriptions of steps, and the comparison of their settings, as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.ahead_of_time.chips import ASSUMPTIONS


def gib(count: float) -> str:
    """Formats bytes as GiB."""
    return f"{count / (1 << 30):.2f}"


def _rows(table: Sequence[Sequence[str]], words: int = 2) -> list[str]:
    """Aligns columns: the first `words`, of words, to the left, the others, of numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.ljust(n) if i < words else cell.rjust(n) for i, (cell, n) in enumerate(cells))

    return [f"  {line(row)}" for row in table]


def render(described: Mapping[str, Any]) -> str:
    """Renders a description: configuration, memory, collectives and lower bounds of the step's time."""
    d = described
    mesh = " x ".join(f"{axis}={size}" for axis, size in d["mesh"].items() if size > 1) or "one device"
    slices = f"{d['num_slices']} x " if d["num_slices"] > 1 else ""
    cut = f" in {d['gradient_accumulation']} microbatches" if d["gradient_accumulation"] > 1 else ""
    lines = [
        f"steps {d['steps'][0]:,}-{d['steps'][1]:,} on {slices}{d['topology']}: {d['devices']:,} devices, {mesh}",
        f"  {d['global_batch_size']:,} rows of {d['seq_len']} tokens{cut}, {d['rows_a_device']} rows per device; "
        f"{d['dtype']}, remat {d['remat']}; compiled in {d['compile_seconds']:.0f} s",
        "",
        "memory per device, GiB",
        f"  peak         {gib(d['peak_bytes']):>8}"
        + (f"  {d['hbm_share']:.0%} of {gib(d['hbm_bytes'])}" if d["hbm_bytes"] else ""),
    ]
    if d["fits"]:
        lines += [f"  arguments    {gib(d['argument_bytes']):>8}", f"  temporaries  {gib(d['temp_bytes']):>8}", ""]
        lines += _collectives(d) + [""] + _speed(d)
    else:
        lines.append(f"  DOES NOT FIT: {gib(d['peak_bytes'] - d['hbm_bytes'])} GiB over")
    return "\n".join(lines)


def _collectives(d: Mapping[str, Any]) -> list[str]:
    if d["collectives"] is None:
        return [f"collectives: unknown: {d['collectives_unread']}"]
    if not d["collectives"]:
        return ["collectives: none"]
    head = ["kind", "along", "type", "loops", "per step", "asynchronous", "MiB per step"]
    table = [
        [
            one["kind"], _along(one), one["dtype"], str(one["loops"]),
            f"{one['count']:,}", f"{one['asynchronous']:,}", f"{one['bytes'] / (1 << 20):,.2f}",
        ]
        for one in d["collectives"]
    ]  # fmt: skip
    return ["collectives", *_rows([head, *table])]


def _along(one: Mapping[str, Any]) -> str:
    axes = "?" if one["axes"] is None else " ".join(one["axes"])
    return f"{axes}, between slices" if one["between_slices"] else axes


def _speed(d: Mapping[str, Any]) -> list[str]:
    lines = [f"model FLOPs per step: {d['model_flops']:.4g}, and {d['recomputed_flops']:.3g} recomputed by remat"]
    if bounds := d["roofline"]:
        network = bounds["network_seconds"]
        lines += [
            f"a step takes at least {1e3 * bounds['at_least_seconds']:.1f} ms ({bounds['bound']}), "
            f"at most {bounds['rows_per_second_at_most']:,.0f} rows per second; sequential "
            f"{1e3 * bounds['one_after_another_seconds']:.1f} ms:",
            f"  compute {1e3 * bounds['compute_seconds']:.1f} ms, memory {1e3 * bounds['memory_seconds']:.1f} ms, "
            f"network {'unknown' if network is None else f'{1e3 * network:.1f} ms'}",
            *(f"  ({line})" for line in ASSUMPTIONS),
        ]
    return lines


def render_choices(phase: Mapping[str, Any]) -> str:
    """Renders the choices of a phase, as `compare_settings` returns them."""
    slices = f"{phase['num_slices']} x " if phase["num_slices"] > 1 else ""
    best = phase["best"]
    lines = [
        f"steps {phase['steps'][0]:,}-{phase['steps'][1]:,} on {slices}{phase['topology']}: {phase['devices']:,} "
        f"devices, {phase['global_batch_size']:,} rows per step, {gib(phase['hbm_bytes'])} GiB per device"
    ]
    if not best:
        return "\n".join([*lines, "  NO SETTING FITS: use more devices, or mesh.fsdp=-1 and mesh.data=1"])
    head = [
        "",
        "remat",
        "attention",
        "rows",
        "microbatches",
        "peak GiB",
        "HBM",
        "PFLOP",
        "at least ms",
        "sequential ms",
    ]
    table = [
        [
            ("*" if one["is_on_front"] else "") + (">" if one["settings"] == best["with"] else ""),
            one["settings"]["remat"], one["settings"]["attention"], str(one["rows_a_device"]),
            str(one["settings"]["gradient_accumulation"]),
            ("" if one["is_compiled"] else "~") + gib(one["peak_bytes"]),
            f"{one['peak_bytes'] / phase['hbm_bytes']:.0%}",
            f"{one['flops'] / 1e15:,.2f}", _milliseconds(one["at_least_seconds"]),
            _milliseconds(one["one_after_another_seconds"]),
        ]
        for one in phase["choices"]
    ]  # fmt: skip
    return "\n".join(
        [
            *lines,
            *_rows([head, *table], words=3),
            "  (* no other setting is at most as large in memory, FLOPs and sequential time; > the least time; "
            "~ interpolated)",
            *(f"  ({line})" for line in ASSUMPTIONS),
            f"best: {' '.join(best['options'])}",
        ]
    )


def _milliseconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1e3 * seconds:,.1f}"
