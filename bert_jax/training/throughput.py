"""A run's speed, and its numbers in one line for the eye."""

import time
from dataclasses import dataclass

import jax

from bert_jax.config import ConfigDict
from bert_jax.model import BertConfig
from bert_jax.training.flops import peak_flops, training_flops


def summary(values: dict[str, float]) -> str:
    """A row in one line."""
    text = (
        f"loss {values['loss']:.3f}  mlm {values['mlm_loss']:.3f} ({values['mlm_accuracy']:.1%})  "
        f"nsp {values['nsp_loss']:.3f} ({values['nsp_accuracy']:.1%})"
    )
    if "tokens_per_second" in values:
        text += f"  {values['tokens_per_second']:,.0f} tokens/s"
    return text


@dataclass
class Throughput:
    """Rates since the last row, compilation and evaluation left out."""

    config: ConfigDict
    model: BertConfig
    seq_len: int

    def __post_init__(self) -> None:
        self._since: tuple[float, int] | None = None
        peak = peak_flops(jax.devices()[0].device_kind)
        self._peak = peak and peak * jax.device_count()
        predictions = self.seq_len if self.model.is_decoder else self.config.data.max_predictions
        self._flops = training_flops(self.model, self.seq_len, predictions)

    def pause(self) -> None:
        """What follows until the next finished step does not count."""
        self._since = None

    def finished(self, step: int) -> None:
        """Step `step` is done."""
        if self._since is None:
            self._since = time.perf_counter(), step

    def rates(self, step: int) -> dict[str, float]:
        """`examples_per_second`, `tokens_per_second` (padding counted) and, where the peak is known, `mfu`."""
        assert self._since is not None
        now = time.perf_counter()
        then, first = self._since
        if step == first:
            return {}
        examples = (step - first) * self.config.global_batch_size / (now - then)
        self._since = now, step
        rates = {"examples_per_second": examples, "tokens_per_second": examples * self.seq_len}
        return rates | ({"mfu": examples * self._flops / self._peak} if self._peak else {})
