"""A picture of what `cachefs-bench scheduling` has measured."""

from pathlib import Path
from typing import Any

import numpy as np

from cachefs_tools.bench.plot import pyplot


def draw(result: dict[str, Any], path: Path) -> None:
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
