"""Draws the results of `cachefs-bench train` and `scheduling`. Callers import it only to draw: it needs matplotlib."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

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


def draw_policies(result: dict[str, Any], path: Path) -> None:
    """Draw completion times by policy, their distribution, and the most jobs per copy. The suffix of the path gives the
    format."""
    policies = result["policies"]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    names, rows = list(policies), np.arange(len(policies))
    for row, name in enumerate(names):
        of_policy = policies[name]
        left.barh(row, of_policy["mean"] / 60, xerr=of_policy["mean_spread"] / 60, color=f"C{row}")
        every = np.sort(np.concatenate([run["completions"] for run in of_policy["runs"]]))
        middle.plot(every / 60, 1 - np.arange(len(every)) / len(every), color=f"C{row}", label=name)
        right.barh(row, of_policy["most_jobs_per_copy"], color=f"C{row}")
    ideal = policies[names[0]]["ideal"] / 60
    left.axvline(ideal, color="black", label="without any waiting")
    left.set(title="mean completion time", xlabel="minutes")
    left.legend()
    middle.set(title="jobs that take longer", xlabel="minutes", xscale="log", yscale="log")
    middle.legend()
    right.set(title="most jobs that read one copy at once")
    for axes in (left, right):
        axes.set_yticks(rows, names)
        axes.invert_yaxis()
    figure.savefig(path)
    pyplot.close(figure)


def draw_sweep(result: dict[str, Any], path: Path) -> None:
    """Draw the improvement of hints over each other policy, for each varied parameter."""
    rows, base = result["rows"], result["rows"][0]
    varied = list(dict.fromkeys(row["changed"] for row in rows if row["changed"]))
    figure, all_axes = pyplot.subplots(1, len(varied), figsize=(4 * len(varied), 4), layout="constrained", sharey=True)
    for name, axes in zip(varied, all_axes, strict=True):
        points = sorted(
            [(row["times"], row["times_better"]) for row in rows if row["changed"] == name]
            + [(1.0, base["times_better"])],
            key=lambda point: point[0],
        )
        for policy in base["times_better"]:
            axes.plot(
                [factor for factor, _ in points], [times[policy]["mean"] for _, times in points], "o-", label=policy
            )
        axes.axhline(1.3, color="black", linestyle=":")
        axes.set(xscale="log", xlabel=f"{name}, times {result['shape'][name]:.3g}")
    all_axes[0].set(ylabel="mean completion, times that of hints")
    all_axes[0].legend()
    figure.savefig(path)
    pyplot.close(figure)
