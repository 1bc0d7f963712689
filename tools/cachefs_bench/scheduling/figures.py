"""Runs the simulation with several seeds, and combines the results; `run_sweep` changes one parameter at a time."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from statistics import fmean, stdev
from typing import Any, Final

import numpy as np

from cachefs_bench.scheduling.simulation import POLICIES, SimulatedPolicyName, SimulationResult, simulate
from cachefs_bench.scheduling.workload import SimulationShape

# Factors by field of `SimulationShape`: seconds that a job computes (so its epochs), bytes of a node's cache, bytes/s
# of the origin, and the share of accelerators that is busy with computing.
FACTORS: Final[dict[str, tuple[float, ...]]] = {
    "seconds": (0.25, 4),
    "capacity": (0.5, 2),
    "origin": (0.5, 4),
    "load": (0.5,),
}
SWEPT_POLICIES: Final[tuple[SimulatedPolicyName, ...]] = ("least loaded", "labels", "hints")


def measure(
    shape: SimulationShape,
    seeds: tuple[int, ...],
    jobs_per_copy: int,
    processes: int,
    policies: tuple[SimulatedPolicyName, ...] = POLICIES,
) -> dict[str, Any]:
    """Run every policy with every seed: the same jobs come at the same times to the same caches. Returns a document for
    JSON."""
    runs = [(shape, seed, policy, jobs_per_copy) for seed in seeds for policy in policies]
    with ProcessPoolExecutor(processes) as pool:
        results = list(pool.map(simulated_figures, runs))
    figures = {
        policy: [result for (_, _, name, _), result in zip(runs, results, strict=True) if name == policy]
        for policy in policies
    }
    return {
        "shape": asdict(shape),
        "seeds": list(seeds),
        "jobs_per_copy": jobs_per_copy,
        "policies": {policy: _summary(of_seeds) for policy, of_seeds in figures.items()},
        "times_better": improvement_ratios(figures) if "hints" in figures else {},
    }


def run_figures(history: SimulationResult) -> dict[str, Any]:
    """Return the figures of one run. Times in seconds."""
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


def simulated_figures(arguments: tuple[SimulationShape, int, SimulatedPolicyName, int]) -> dict[str, Any]:
    """Run `simulate` with these arguments and return its figures. For another process."""
    return run_figures(simulate(*arguments))


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over seeds, the spread of the mean completion time, and each seed's figures."""
    names = [name for name in runs[0] if name != "completions"]
    means = {name: fmean(run[name] for run in runs) for name in names}
    spread = stdev(run["mean"] for run in runs) if len(runs) > 1 else 0.0
    return means | {"mean_spread": spread, "runs": runs}


def improvement_ratios(figures: dict[SimulatedPolicyName, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return by policy the ratio of its mean completion time to that of "hints" over seeds (mean, least and most), and
    the ratio of the time that jobs lose."""
    found: dict[str, Any] = {}
    for policy, runs in figures.items():
        ratios = [its["mean"] / ours["mean"] for its, ours in zip(runs, figures["hints"], strict=True)]
        lost = [
            (its["mean"] - its["ideal"]) / max(ours["mean"] - ours["ideal"], 1e-9)
            for its, ours in zip(runs, figures["hints"], strict=True)
        ]
        found[policy] = {"mean": fmean(ratios), "least": min(ratios), "most": max(ratios), "lost_time": fmean(lost)}
    return found


def run_sweep(shape: SimulationShape, seeds: tuple[int, ...], processes: int) -> dict[str, Any]:
    """Run *shape* and its variations with every seed. Returns a document for JSON."""
    shapes = [("", 1.0, shape)]
    for name, factors in FACTORS.items():
        now = getattr(shape, name)
        shapes += [(name, factor, replace(shape, **{name: type(now)(now * factor)})) for factor in factors]
    runs = [(one, seed, policy, 0) for _, _, one in shapes for seed in seeds for policy in SWEPT_POLICIES]
    with ProcessPoolExecutor(processes) as pool:
        results = list(pool.map(simulated_figures, runs))
    rows = []
    for name, factor, one in shapes:
        here = [(run, result) for run, result in zip(runs, results, strict=True) if run[0] is one]
        by_policy = {policy: [result for run, result in here if run[2] == policy] for policy in SWEPT_POLICIES}
        rows.append({"changed": name, "times": factor, "times_better": improvement_ratios(by_policy)})
        rows[-1] |= {
            policy: {key: sum(run[key] for run in of_seeds) / len(seeds) for key in ("mean", "waited", "ideal")}
            for policy, of_seeds in by_policy.items()
        }
    return {"shape": asdict(shape), "seeds": list(seeds), "rows": rows}
