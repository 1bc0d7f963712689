"""What a real Slurm makes of a preference, beside a model of it, for parts and busy nodes drawn at random."""

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from cachefs_scheduler.slurm.hint_file import divide_holders
from tests.scheduler.slurm.hinted import HintedSlurm, hinted_slurm

TRIALS = 30


@pytest.mark.cluster
def test_jobs_get_the_best_nodes_that_are_free_and_never_break_a_constraint(tmp_path: Path) -> None:
    draw = random.Random(13)
    with hinted_slurm(tmp_path) as hinted:
        nodes = hinted.slurm.nodes
        for trial in range(TRIALS):
            # A dataset of its own, so that no feature of an earlier trial counts.
            dataset = f"set{trial}"
            parts = {node: draw.choice((0.2, 0.5, 0.8, 1.0)) for node in draw.sample(nodes, draw.randint(1, 4))}
            hinted.hold(**{dataset: parts})
            busy = draw.sample(nodes, draw.randint(0, 2))
            for node in busy:
                hinted.run_on("--ntasks=4", f"--nodelist={node}")
            free = set(nodes) - set(busy)
            _check(hinted, draw, (dataset, parts), free)
            hinted.slurm.cancel_all()


def _check(hinted: HintedSlurm, draw: random.Random, held: tuple[str, Mapping[str, float]], free: set[str]) -> None:
    dataset, parts = held
    count = draw.randint(1, len(free))
    wide = draw.sample(sorted(free), draw.randint(count, len(free)))
    constrained = draw.random() < 0.4
    if constrained:
        for node in hinted.slurm.nodes:
            _set_wide(hinted, node, node in wide)
    options = ["--constraint=wide"] if constrained else []
    _, found = hinted.run_on(f"--nodes={count}", f"--ntasks={4 * count}", f"--comment=cachefs:{dataset}", *options)
    assert len(found) == count
    if constrained:
        assert set(found) <= set(wide)
    elif count > len(parts):
        assert set(parts) <= set(found) or not set(parts) <= free
    else:
        sets = divide_holders(parts, [hinted.slurm.nodes]).nested.values()
        best = next((each & free for each in sets if len(each) >= count and len(each & free) >= count), free)
        assert set(found) <= best, (parts, free, count)


def _set_wide(hinted: HintedSlurm, node: str, wide: bool) -> None:
    """As an administrator does."""
    words = hinted.slurm.node_features(node)[0] - {"wide"} | ({"wide"} if wide else set())
    text = ",".join(sorted(words))
    hinted.slurm.run_command(
        "scontrol", "update", f"NodeName={node}", f"AvailableFeatures={text}", f"ActiveFeatures={text}"
    )
