"""Metrics as Prometheus reads them, out of plain numbers; used by workers and the exporter.

`prometheus_client` is imported when somebody scrapes, not before.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from producer.contract.metrics import Metric


class Histogram:
    """Counts of observed values by bucket. Changed by one thread, read by others."""

    def __init__(self, metric: Metric) -> None:
        self._bounds = metric.buckets
        self.counts = [0] * (len(metric.buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value


#: a family, the values of its labels, and its value
Sample = tuple[Metric, tuple[str, ...], float | Histogram]


def render(samples: Iterable[Sample]) -> bytes:
    """The text of a scrape. Samples of one family need not be next to each other."""
    from prometheus_client import generate_latest
    from prometheus_client.core import Metric as Family

    families: dict[str, Any] = {}
    for metric, values, value in samples:
        name = metric.name.removesuffix("_total") if metric.type == "counter" else metric.name
        family = families.setdefault(name, Family(name, metric.help, metric.type))
        labels = dict(zip(metric.labels, values, strict=True))
        if isinstance(value, Histogram):
            total = 0
            for bound, count in zip((*metric.buckets, float("inf")), value.counts, strict=True):
                total += count
                le = "+Inf" if bound == float("inf") else f"{float(bound)}"
                family.add_sample(f"{name}_bucket", {**labels, "le": le}, total)
            family.add_sample(f"{name}_sum", labels, value.sum)
            family.add_sample(f"{name}_count", labels, total)
        else:
            family.add_sample(metric.name, labels, value)
    text: bytes = generate_latest(SimpleNamespace(collect=families.values))
    return text
