"""Runs of the simulation with several seeds, and what they come to."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

import numpy as np

from cachefs_tools.bench.scheduling.simulation import POLICIES, History, Name, simulate
from cachefs_tools.bench.scheduling.workload import Shape


def measure(
    shape: Shape, seeds: tuple[int, ...], jobs_per_copy: int, processes: int, policies: tuple[Name, ...] = POLICIES
) -> dict[str, Any]:
    """Every policy with every seed: the same jobs come at the same times to the same caches. A document for JSON."""
    runs = [(shape, seed, policy, jobs_per_copy) for seed in seeds for policy in policies]
    with ProcessPoolExecutor(processes) as pool:
        results = list(pool.map(figures_of, runs))
    figures = {
        policy: [result for (_, _, name, _), result in zip(runs, results, strict=True) if name == policy]
        for policy in policies
    }
    return {
        "shape": asdict(shape),
        "seeds": list(seeds),
        "jobs_per_copy": jobs_per_copy,
        "policies": {policy: _summary(of_seeds) for policy, of_seeds in figures.items()},
        "times_better": times_better(figures) if "hints" in figures else {},
    }


def of_run(history: History) -> dict[str, Any]:
    """One run in numbers. Times in seconds."""
    completions = np.array([one.completion for one in history.outcomes])
    ideals = np.array([one.ideal for one in history.outcomes])
    return {
        "mean": float(completions.mean()),
        "p50": float(np.percentile(completions, 50)),
        "p95": float(np.percentile(completions, 95)),
        "p99": float(np.percentile(completions, 99)),
        "waited": fmean(one.waited for one in history.outcomes),
        "ideal": float(ideals.mean()),
        "slowdown": float((completions / ideals).mean()),
        "slowdown_p99": float(np.percentile(completions / ideals, 99)),
        "origin_bytes": history.origin_bytes,
        "most_jobs_per_copy": max(history.most_per_copy.values(), default=0),
        "clones": history.clones,
        "completions": sorted(completions.round(1).tolist()),
    }


def figures_of(arguments: tuple[Shape, int, Name, int]) -> dict[str, Any]:
    """Of the run with these arguments of `simulate`: for another process."""
    return of_run(simulate(*arguments))


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The means over seeds, the spread of the mean completion time, and each seed's figures."""
    names = [name for name in runs[0] if name != "completions"]
    means = {name: fmean(run[name] for run in runs) for name in names}
    spread = stdev(run["mean"] for run in runs) if len(runs) > 1 else 0.0
    return means | {"mean_spread": spread, "runs": runs}


def times_better(figures: dict[Name, list[dict[str, Any]]]) -> dict[str, Any]:
    """By policy, how many times its mean completion time is that of "hints", seed by seed: mean, least and most; and
    how many times the time that jobs lose is."""
    found: dict[str, Any] = {}
    for policy, runs in figures.items():
        ratios = [its["mean"] / ours["mean"] for its, ours in zip(runs, figures["hints"], strict=True)]
        lost = [
            (its["mean"] - its["ideal"]) / max(ours["mean"] - ours["ideal"], 1e-9)
            for its, ours in zip(runs, figures["hints"], strict=True)
        ]
        found[policy] = {"mean": fmean(ratios), "least": min(ratios), "most": max(ratios), "lost_time": fmean(lost)}
    return found
