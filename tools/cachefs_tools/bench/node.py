"""A daemon over a local directory, for benchmarks that need no S3 server."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cachefs.messages import DatasetAdd
from cachefs.rpc import DATASET_ADD, DaemonClient
from cachefs_tools.scratch_node import daemon

CONFIG = """\
[daemon]
socket = "{socket}"
state_dir = "{work}/state"

[memory]
dir = "{tier}"
budget = {memory}

[ssd]
dir = "{work}/ssd"
budget = 0
"""


@contextmanager
def dataset_node(work: Path, source: Path, memory: int) -> Iterator[tuple[DaemonClient, Path]]:
    """A client of the daemon and its socket; the directory *source* is the dataset `bench`. memory: bytes."""
    socket, config = work / "cachefsd.sock", work / "cachefsd.toml"
    tier = Path(tempfile.mkdtemp(prefix="cachefs-bench-", dir="/dev/shm"))
    try:
        config.write_text(CONFIG.format(work=work, socket=socket, tier=tier, memory=memory))
        with daemon(config, socket, work / "cachefsd.log") as client:
            for _ in client.stream(DATASET_ADD, DatasetAdd(name="bench", url=f"file://{source}")):
                pass
            yield client, socket
    finally:
        shutil.rmtree(tier, ignore_errors=True)
