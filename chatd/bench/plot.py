"""A curve as a picture, with matplotlib, which comes with chatd[bench]."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from chatd.bench.histories import Curve
from chatd.bench.statistics import Group
from chatd.failure import CommandFailed


def require_matplotlib() -> None:
    """Raises CommandFailed where it is not installed."""
    if find_spec("matplotlib") is None:
        raise CommandFailed("--plot needs matplotlib: pip install 'chatd[bench]'")


def draw(curve: Curve, title: str, path: Path) -> None:
    """A PNG: the median TTFT against the length of the history, and a bar up to the 95th percentile."""
    from matplotlib.figure import Figure  # an optional package

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, marker, groups in (
        ("without prefix cache", "s", [(point.history, point.uncached) for point in curve.points]),
        ("with prefix cache", "o", [(point.history, point.cached) for point in curve.points]),
    ):
        known = [(history, *times) for history, group in groups if (times := _times(group)) is not None]
        if known:
            lengths, medians, highs = zip(*known, strict=True)
            above = [high - median for median, high in zip(medians, highs, strict=True)]
            bars = [[0.0] * len(above), above]
            axes.errorbar(lengths, medians, yerr=bars, marker=marker, capsize=3, label=name)
    axes.set(xlabel="history, tokens", ylabel="time to the first token, ms (median, bar to p95)", title=title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    figure.savefig(path, format="png", dpi=150)


def _times(group: Group) -> tuple[float, float] | None:
    """Median and 95th percentile, ms."""
    if group.ttft.p50_ms is None or group.ttft.p95_ms is None:
        return None
    return group.ttft.p50_ms, group.ttft.p95_ms
