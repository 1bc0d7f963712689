"""A daemon whose dataset is a local directory, for benchmarks that need no S3 server."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cachefs.messages import DatasetAddRequest, OriginOptions
from cachefs.rpc import DATASET_ADD, DaemonClient
from cachefs_bench.lab.scratch_config import NodeSettings
from cachefs_bench.lab.scratch_node import ScratchNode, memory_directory, run_daemon

# Name of the dataset in all benchmarks.
DATASET: Final = "bench"


@contextmanager
def run_directory_node(work: Path, source: Path, settings: NodeSettings) -> Iterator[ScratchNode]:
    """Run a node with the directory *source* listed as the dataset DATASET."""
    with memory_directory("cachefs-bench-") as memory, run_daemon(work, memory, settings) as node:
        list_dataset(node.client, f"file://{source}")
        yield node


def list_dataset(client: DaemonClient, url: str, options: OriginOptions | None = None) -> None:
    """List *url* as the dataset DATASET. Returns when the listing is complete."""
    request = DatasetAddRequest(name=DATASET, url=url, options=options or OriginOptions())
    for _ in client.stream_responses(DATASET_ADD, request):
        pass
