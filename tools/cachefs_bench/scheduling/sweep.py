"""Measures the benefit of hints on variations of one cluster, changing one parameter at a time."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import Any, Final

from cachefs_bench.scheduling.figures import improvement_ratios, simulated_figures
from cachefs_bench.scheduling.simulation import SimulatedPolicyName
from cachefs_bench.scheduling.workload import SimulationShape

# Factors by field of `SimulationShape`: seconds that a job computes (so its epochs), bytes of a node's cache, bytes/s
# of the origin, and the share of accelerators that is busy with computing.
FACTORS: Final[dict[str, tuple[float, ...]]] = {
    "seconds": (0.25, 4),
    "capacity": (0.5, 2),
    "origin": (0.5, 4),
    "load": (0.5,),
}
POLICIES: Final[tuple[SimulatedPolicyName, ...]] = ("least loaded", "labels", "hints")


def run_sweep(shape: SimulationShape, seeds: tuple[int, ...], processes: int) -> dict[str, Any]:
    """Run *shape* and its variations with every seed. Returns a document for JSON."""
    shapes = [("", 1.0, shape)]
    for name, factors in FACTORS.items():
        now = getattr(shape, name)
        shapes += [(name, factor, replace(shape, **{name: type(now)(now * factor)})) for factor in factors]
    runs = [(one, seed, policy, 0) for _, _, one in shapes for seed in seeds for policy in POLICIES]
    with ProcessPoolExecutor(processes) as pool:
        results = list(pool.map(simulated_figures, runs))
    rows = []
    for name, factor, one in shapes:
        here = [(run, result) for run, result in zip(runs, results, strict=True) if run[0] is one]
        by_policy = {policy: [result for run, result in here if run[2] == policy] for policy in POLICIES}
        rows.append({"changed": name, "times": factor, "times_better": improvement_ratios(by_policy)})
        rows[-1] |= {
            policy: {key: sum(run[key] for run in of_seeds) / len(seeds) for key in ("mean", "waited", "ideal")}
            for policy, of_seeds in by_policy.items()
        }
    return {"shape": asdict(shape), "seeds": list(seeds), "rows": rows}
