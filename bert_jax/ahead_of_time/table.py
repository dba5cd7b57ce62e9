"""Renders the description of a step as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.ahead_of_time.chips import ASSUMPTIONS


def gib(count: float) -> str:
    """Formats bytes as GiB."""
    return f"{count / (1 << 30):.2f}"


def _rows(table: Sequence[Sequence[str]]) -> list[str]:
    """Aligns columns: the first two, of words, to the left, the others, of numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.ljust(n) if i < 2 else cell.rjust(n) for i, (cell, n) in enumerate(cells))

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
    head = ["kind", "along", "type", "loops", "per step", "MiB per step"]
    table = [
        [
            one["kind"], _along(one), one["dtype"], str(one["loops"]),
            f"{one['count']:,}", f"{one['bytes'] / (1 << 20):,.2f}",
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
