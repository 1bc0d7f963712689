"""The table and the summaries of `cachefs-bench train`."""

from typing import Any

from rich import box
from rich.table import Table

JOB_COLUMNS = (
    "utili-\nsation",
    "first\nbatch s",
    "samples\n/s",
    "stalled\ns",
    "by epoch",
    "stall after\nepoch 1",
    "late after\nepoch 1",
    "wrong",
)
NODE_COLUMNS = ("on node\nafter 1st", "origin\nMB", "of the\nleast", "busy\ncores")


def table(documents: list[dict[str, Any]]) -> Table:
    """Return a table with a row per job. The first job's row of a run also has the node's figures."""
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("", no_wrap=True)
    for heading in (*JOB_COLUMNS, *NODE_COLUMNS):
        result.add_column(heading, justify="right")
    for document in documents:
        title, node = document["run"], _node_cells(document)
        for job in document["jobs"]:
            result.add_row(title, *_job_cells(job), *node)
            title, node = "", []
    return result


def summary(document: dict[str, Any]) -> str:
    """Summarise a run in one line, by its first job."""
    job = document["jobs"][0]
    return (
        f"  utilisation {job['utilisation']:.3f}, stalled {job['stall_seconds']:.1f} s of {job['seconds']:.1f} s, "
        f"origin {document['origin']['bytes'] / 1e6:.1f} MB, {document['machine']['busy_cores']:.2f} cores busy"
    )


def _job_cells(job: dict[str, Any]) -> list[str]:
    return [
        f"{job['utilisation']:.3f}",
        f"{job['time_to_first_batch']:.2f}",
        f"{job['samples_per_s']:.0f}",
        f"{job['stall_seconds']:.1f}",
        " ".join(f"{epoch['stall_seconds']:.1f}" for epoch in job["epochs"]),
        f"{100 * job['stall_after_first_epoch']:.1f} %",
        f"{100 * job['late_after_first_epoch']:.2f} %",
        str(job["damaged"]),
    ]


def _node_cells(document: dict[str, Any]) -> list[str]:
    origin = document["origin"]
    return [
        f"{100 * document['found_on_node_after_first_batch']:.2f} %",
        f"{origin['bytes'] / 1e6:.1f}",
        f"{origin['samples'] / origin['expected_samples']['belady']:.3f}",
        f"{document['machine']['busy_cores']:.2f}",
    ]
