"""Agreement of the training step: with the CPU, and between two runs.

`parity` runs the same batch and state on the GPU and on the CPU, in fp32 with products of the highest precision, and
compares losses, gradient norm and updated parameters. Other precisions and `attention=cudnn` follow, each beside the
fp32 step on the CPU.
`determinism` compares two runs of a process, and two processes, with `--xla_gpu_deterministic_ops=true` and without.
"""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from on_gpu.cases import Cases
from on_gpu.scale import FULL, REHEARSAL, Scale
from on_gpu.steps import Setting, Step
from processes import call

SEQ_LEN = 128
PARITY_STEPS = 3
NO_ATTENTION_DROPOUT = (("model.attention_probs_dropout_prob", "0.0"),)
PARITY_COLUMNS = {
    "computed in": "{case}",
    "outcome": "{outcome}",
    "loss, step 1": "{first_loss:.1e}",
    f"loss, step {PARITY_STEPS}": "{last_loss:.1e}",
    "gradient norm, step 1": "{grad_norm:.1e}",
    "update of the parameters": "{update:.1e}",
}
DETERMINISM_COLUMNS = {
    "flags": "{case}",
    "outcome": "{outcome}",
    "two runs of a process": "{same_process}",
    "two processes": "{other_process}",
    "steps": "{steps}",
}
FLAG = "--xla_gpu_deterministic_ops=true"


@dataclass(frozen=True)
class Run:
    """Losses and gradient norms of the steps, and the parameters before and after them, flat."""

    losses: list[float]
    grad_norms: list[float]
    before: np.ndarray
    after: np.ndarray


def run(step: Step, state: Any, steps: int) -> Run:
    """Runs `steps` steps from a state in numpy."""
    device_state = jax.device_put(state, step.spec.shardings)
    losses, norms = [], []
    for _ in range(steps):
        device_state, metrics = step(device_state)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return Run(losses, norms, flat(state.parameters), flat(device_state.parameters))


def flat(parameters: Any) -> np.ndarray:
    """Returns all parameters in one array float64 [N]."""
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(parameters)])


def errors(found: Run, expected: Run) -> dict[str, float]:
    """Returns relative errors; that of the update is in the Euclidean norm over all parameters."""
    relative = lambda a, b: abs(a - b) / abs(b)  # noqa: E731
    moved = np.linalg.norm(expected.after - expected.before)
    return {
        "first_loss": relative(found.losses[0], expected.losses[0]),
        "last_loss": relative(found.losses[-1], expected.losses[-1]),
        "grad_norm": relative(found.grad_norms[0], expected.grad_norms[0]),
        "update": float(np.linalg.norm(found.after - expected.after) / moved),
    }


def parity(cases: Cases, scale: Scale) -> None:
    """Measures the errors of the step on the default device, beside the fp32 step on the CPU."""
    exact = Setting(
        scale.small, scale.small_rows, SEQ_LEN, packed=True, overrides=(("dtype", "float32"),), precision="highest"
    )
    references: dict[tuple, tuple[Any, Run]] = {}

    def compare(setting: Setting, dropout: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        if dropout not in references:
            step = Step(replace(exact, overrides=exact.overrides + dropout), jax.devices("cpu")[:1])
            state = jax.tree.map(np.asarray, step.spec.make())
            references[dropout] = state, run(step, state, PARITY_STEPS)
        state, expected = references[dropout]
        step = Step(replace(setting, overrides=setting.overrides + dropout))
        return errors(run(step, state, PARITY_STEPS), expected) | {"compile_seconds": step.compile_seconds}

    bfloat16 = replace(exact, overrides=(("dtype", "bfloat16"),), precision=None)
    cases.measure("fp32, highest precision", lambda: compare(exact, ()))
    cases.measure("fp32, default precision", lambda: compare(replace(exact, precision=None), ()))
    cases.measure("bf16", lambda: compare(bfloat16, ()))
    cases.measure("bf16, no attention dropout", lambda: compare(bfloat16, NO_ATTENTION_DROPOUT))
    cases.measure(
        "bf16, attention=cudnn, no attention dropout",
        lambda: compare(
            replace(bfloat16, overrides=(*bfloat16.overrides, ("attention", "cudnn"))), NO_ATTENTION_DROPOUT
        ),
    )


def determinism(cases: Cases, scale: Scale) -> None:
    """Runs two processes with the flag and two without, and compares the digests of their parameters."""

    def compare(flag: str) -> Mapping[str, Any]:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        share = {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process has memory as well
        with ThreadPoolExecutor() as threads:
            runs = [threads.submit(call, digests, scale is REHEARSAL, **share) for _ in range(2)]
        first, second = (run.result() for run in runs)
        same = first[0] == first[1] and second[0] == second[1]
        return {
            "same_process": "bit-identical" if same else "different",
            "other_process": "bit-identical" if first[0] == second[0] else "different",
            "steps": scale.repeated_steps,
        }

    for case, flag in {FLAG: FLAG, "none": ""}.items():
        cases.measure(case, lambda flag=flag: compare(flag))


def digests(rehearse: bool) -> list[str]:
    """Returns the digests of the parameters after two runs from the same state."""
    scale = REHEARSAL if rehearse else FULL
    step = Step(Setting(scale.small, scale.small_rows, SEQ_LEN))
    state = jax.tree.map(np.asarray, step.spec.make())
    runs = (run(step, state, scale.repeated_steps) for _ in range(2))
    return [hashlib.sha256(found.after.tobytes()).hexdigest() for found in runs]
