"""Mixture of several sources in fixed shares; each source keeps its own order."""

from collections.abc import Sequence

import numpy as np

from bert_jax.data.hashing import key_from, permute

_PERIOD = 4096  # rows in which the count of each source is exact to one row
_ONE = 1 << 32  # fixed-point representation of the share 1


def row_shares(sizes: Sequence[int], weights: Sequence[float] = ()) -> list[float]:
    """Returns each source's share of the rows, proportional to `weights`, by default to `sizes` (rows an epoch)."""
    shares = np.asarray(weights or sizes, np.float64)
    shares /= shares.max()
    result: list[float] = (shares / shares.sum()).tolist()
    return result


class Mixture:
    """Assigns each row of an endless sequence to a source: a pure function of (weights, key, row)."""

    def __init__(self, weights: Sequence[float], key: int):
        """`weights` are relative to their sum; `key` is the random key of the order."""
        shares = np.cumsum(np.asarray(weights, np.float64)) / np.sum(weights)
        self._bounds = [0, *(round(share * _ONE) for share in shares[:-1].tolist()), _ONE]
        self._shares = np.diff(self._bounds).tolist()
        # The bounds are rounded: between two of them, the count of less than a row in a period would decrease.
        self._has_rare_source = any(_PERIOD * share < _ONE for share in self._shares[1:-1])
        self._key = key

    def _period_counts(self, period: int) -> list[int]:
        """Returns the number of rows of each source before a period."""
        if not self._has_rare_source:
            result: list[int] = np.diff([period * _PERIOD * bound // _ONE for bound in self._bounds]).tolist()
            return result
        counts = [period * _PERIOD * share // _ONE for share in self._shares]
        counts[self._shares.index(max(self._shares))] += period * _PERIOD - sum(counts)
        return counts

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each row int64 [n] and its index among that source's rows, both int64 [n]."""
        sources, numbers = np.empty_like(rows), np.empty_like(rows)
        periods = rows // _PERIOD
        for period in np.unique(periods).tolist():
            before = np.array(self._period_counts(period))
            inside = np.array(self._period_counts(period + 1)) - before
            shuffled = permute(np.arange(_PERIOD), _PERIOD, key_from(self._key, period))
            source_of = np.repeat(np.arange(len(inside)), inside)[shuffled]
            number_of = np.empty(_PERIOD, np.int64)
            for source, count in enumerate(inside.tolist()):
                number_of[source_of == source] = before[source] + np.arange(count)
            chosen = periods == period
            places = rows[chosen] - period * _PERIOD
            sources[chosen], numbers[chosen] = source_of[places], number_of[places]
        return sources, numbers

    def counts(self, rows: int) -> list[int]:
        """Returns the number of rows of each source among the first `rows` rows."""
        period = rows // _PERIOD
        counts = np.array(self._period_counts(period))
        sources, _ = self.locate(np.arange(period * _PERIOD, rows))
        result: list[int] = (counts + np.bincount(sources, minlength=len(counts))).tolist()
        return result
