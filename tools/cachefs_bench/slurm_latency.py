"""`cachefs-bench slurm`: measures the cost of job_submit.lua and its hint file for submissions and the controller.

Two Slurms run at once, one of them without the Lua files, and get jobs in turns. The jobs are held, so only the
submission is measured: the time of a whole sbatch, and the controller's time according to sdiag.
"""

import json
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from cachefs_bench.lab.slurm import LabSlurm, run_slurm
from cachefs_scheduler.slurm.hint import PLUGIN_DIRECTORY
from cachefs_scheduler.slurm.hint_file import HintHeading, HintStamp, divide_holders, hints_text

_COMMENT: Final = "--comment=cachefs:{dataset}"
# From sdiag: microseconds of all submissions, from request to response, including the plugin and waits for locks.
_TOTAL: Final = re.compile(r"REQUEST_SUBMIT_BATCH_JOB .*total_time:(\d+)")
_SCRIPT: Final = "#!/bin/sh\n#CACHEFS dataset={dataset}\n" + "# a comment in a script\n" * 200 + "sleep 1\n"


@dataclass(frozen=True, slots=True)
class SlurmLoad:
    """The submissions, and the size of the hint file."""

    jobs: int  # of each kind
    datasets: int  # in the hint file
    nodes: int  # nodes of each dataset in the hint file


def measure(work: Path, load: SlurmLoad) -> dict[str, Any]:
    """Return the figures. Raises CachefsError if Slurm is missing."""
    with ExitStack() as stack:
        directories = {name: work / name for name in ("plain", "lua")}
        for directory in directories.values():
            directory.mkdir()
        hints = work / "hints"
        _write_lua(directories["lua"], hints)
        hints.write_text(_hint_file_text(load))
        plain = stack.enter_context(run_slurm(directories["plain"]))
        lua = stack.enter_context(run_slurm(directories["lua"], more="JobSubmitPlugins=lua"))
        dataset = f"dataset-{load.datasets - 1}"
        script = _SCRIPT.format(dataset=dataset)
        comment = _COMMENT.format(dataset=dataset)
        kinds: dict[str, tuple[LabSlurm, Sequence[str], str]] = {
            "without": (plain, (), "#!/bin/sh\nsleep 1\n"),
            "reads_nothing": (lua, (), "#!/bin/sh\nsleep 1\n"),
            "by_comment": (lua, (comment,), "#!/bin/sh\nsleep 1\n"),
            "by_directive": (lua, (), script),
            "with_constraint": (lua, (comment, "--constraint=lab"), "#!/bin/sh\nsleep 1\n"),
        }
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        inside: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(-5, load.jobs):  # the first five are not counted
            for kind, (slurm, options, text) in kinds.items():
                before, begun = _controller_microseconds(slurm), time.perf_counter()
                last = slurm.submit_job("--hold", *options, script=text)
                if turn >= 0:
                    taken[kind].append(1e3 * (time.perf_counter() - begun))
                    inside[kind].append((_controller_microseconds(slurm) - before) / 1e3)
        return {
            "jobs": load.jobs,
            "hint_file_bytes": hints.stat().st_size,
            "kinds": {
                kind: {"sbatch_ms": _quantiles(taken[kind]), "controller_ms": _quantiles(inside[kind])}
                for kind in kinds
            },
            "last_preferred": _preferred(lua, last),
        }


def _write_lua(directory: Path, hints: Path) -> None:
    (directory / "cachefs.lua").write_text((PLUGIN_DIRECTORY / "cachefs.lua").read_text())
    text = (PLUGIN_DIRECTORY / "job_submit.lua").read_text()
    (directory / "job_submit.lua").write_text(f'{text}\ncachefs.file = "{hints}"\n')


def _hint_file_text(load: SlurmLoad) -> str:
    """Return hints with each dataset on *load.nodes* nodes, in decreasing parts."""
    nodes = {f"n{number}": 1 - number / (2 * load.nodes) for number in range(load.nodes)}
    levels = divide_holders(nodes, [])
    sets = {f"dataset-{number}": levels for number in range(load.datasets)}
    return hints_text(HintHeading(HintStamp.current(), 86400, True, "begin", 120, 4), sets, {})


def _controller_microseconds(slurm: LabSlurm) -> int:
    """Return the microseconds that the controller has spent on submissions so far."""
    found = _TOTAL.search(slurm.run_command("sdiag"))
    return int(found[1]) if found is not None else 0


def _preferred(slurm: LabSlurm, job: int) -> str:
    """Return the job's preference, as evidence that hints were in effect."""
    shown = slurm.run_command("scontrol", "show", "job", str(job))
    return next((line.strip() for line in shown.splitlines() if "Prefer=" in line), "")


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    low, median, high = np.quantile(values, (0.1, 0.5, 0.95))
    return {"p10": round(float(low), 3), "median": round(float(median), 3), "p95": round(float(high), 3)}


@click.command("slurm")
@click.option("--jobs", default=200, show_default=True, type=click.IntRange(min=1), help="Submissions of each kind.")
@click.option(
    "--datasets", default=200, show_default=True, type=click.IntRange(1, 5000), help="Datasets in the hint file."
)
@click.option(
    "--nodes", default=64, show_default=True, type=click.IntRange(2, 1000), help="Nodes that each of them is on."
)
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work.  [default: a temporary directory]",
)  # fmt: skip
def slurm_command(jobs: int, datasets: int, nodes: int, directory: Path | None) -> None:
    """Measure submissions to Slurm, with job_submit.lua and without.

    Two Slurms with four nodes each run on this machine, as root, and get jobs in turns.
    """
    with tempfile.TemporaryDirectory(prefix="cfs-", dir=directory) as work:
        load = SlurmLoad(jobs, datasets, nodes)
        click.echo(json.dumps(measure(Path(work), load), indent=2))
