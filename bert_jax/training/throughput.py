"""A run's speed, and its numbers in one line for the eye."""

import time
from dataclasses import dataclass

import jax

from bert_jax.config import ConfigDict
from bert_jax.data.loader import TrainLoader
from bert_jax.model import BertConfig
from bert_jax.training.flops import peak_flops, training_flops


def summary(values: dict[str, float]) -> str:
    """A row in one line."""
    text = f"loss {values['loss']:.3f}"
    for head in ("mlm", "nsp"):
        if f"{head}_loss" in values:
            text += f"  {head} {values[f'{head}_loss']:.3f} ({values[f'{head}_accuracy']:.1%})"
    if "tokens_per_second" in values:
        text += f"  {values['tokens_per_second']:,.0f} tokens/s"
    return text


@dataclass
class Throughput:
    """Rates since the last row, compilation and evaluation left out."""

    config: ConfigDict
    model: BertConfig
    loader: TrainLoader

    def __post_init__(self) -> None:
        self._since: tuple[float, int] | None = None
        peak = peak_flops(jax.devices()[0].device_kind)
        self._peak = peak and peak * jax.device_count()
        first = self.loader.sources[0]
        self._seq_len = first.dataset.info.seq_len
        self._flops = training_flops(self.model, self._seq_len, first.predictions, first.max_sequences)

    def pause(self) -> None:
        """What follows until the next finished step does not count."""
        self._since = None

    def finished(self, step: int) -> None:
        """Step `step` is done."""
        if self._since is None:
            self._since = time.perf_counter(), step

    def rates(self, step: int) -> dict[str, float]:
        """`examples_per_second` (sequences, packed or not), `tokens_per_second` (padding counted, as in `mfu`).

        With `mfu` where the device's peak is known, and with `real_tokens_per_second` where rows are packed.
        """
        assert self._since is not None
        now = time.perf_counter()
        then, first = self._since
        if step == first:
            return {}
        rows = (step - first) * self.config.global_batch_size / (now - then)
        self._since = now, step
        tokens = rows * self._seq_len
        rates = {"examples_per_second": rows * self.loader.sequences_a_row, "tokens_per_second": tokens}
        if self.config.data.packing:
            rates["real_tokens_per_second"] = tokens * self.loader.real_share
        return rates | ({"mfu": rows * self._flops / self._peak} if self._peak else {})
