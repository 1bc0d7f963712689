"""Draws the results of `cachefs-bench scheduling`."""

from pathlib import Path
from typing import Any

import numpy as np

from cachefs_bench.plot import pyplot


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
    figure, places = pyplot.subplots(1, len(varied), figsize=(4 * len(varied), 4), layout="constrained", sharey=True)
    for name, axes in zip(varied, places, strict=True):
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
    places[0].set(ylabel="mean completion, times that of hints")
    places[0].legend()
    figure.savefig(path)
    pyplot.close(figure)
