"""Draws the runs of `cachefs-bench train`. Callers import matplotlib from here, and only to draw."""

import sys
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as pyplot
except ImportError:
    raise CachefsError(
        f"drawing needs matplotlib; install it with: {sys.executable} -m pip install matplotlib"
    ) from None


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw utilisation, stalls by epoch and origin bytes of each run. The suffix of the path gives the format."""
    runs = result["runs"]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 1.5 + 0.45 * len(runs)), layout="constrained")
    names = [run["run"] for run in runs]
    _draw_bars(left, names, [[job["utilisation"] for job in run["jobs"]] for run in runs])
    left.set(title="accelerator utilisation", xlim=(0, 1))
    _draw_stacked_bars(middle, names, [[epoch["stall_seconds"] for epoch in run["jobs"][0]["epochs"]] for run in runs])
    middle.set(title="stall by epoch (first job)", xlabel="seconds")
    _draw_bars(right, names, [[run["origin"]["bytes"] / 1e6] for run in runs])
    for row, run in enumerate(runs):
        least = run["origin"]["expected_samples"]["belady"] * run["scenario"]["shape"]["size"] / 1e6
        right.plot([least, least], [row - 0.4, row + 0.4], color="black", label="least possible" if not row else None)
    right.set(title="bytes from the origin", xlabel="MB")
    right.legend()
    figure.savefig(path)
    pyplot.close(figure)


def _draw_bars(axes: Any, names: list[str], groups: list[list[float]]) -> None:
    for row, values in enumerate(groups):
        for number, value in enumerate(values):
            axes.barh(row + 0.8 * (number + 0.5) / len(values) - 0.4, value, 0.8 / len(values), color=f"C{number}")
    _name_rows(axes, names)


def _draw_stacked_bars(axes: Any, names: list[str], groups: list[list[float]]) -> None:
    for row, values in enumerate(groups):
        start = 0.0
        for number, value in enumerate(values):
            axes.barh(row, value, 0.8, left=start, color=f"C{number}", label=f"epoch {number + 1}" if not row else None)
            start += value
    axes.legend()
    _name_rows(axes, names)


def _name_rows(axes: Any, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
