"""The processes that serve peers are started again where one is silent, so they must start fast."""

import subprocess
import sys


def test_a_peer_server_imports_no_configuration() -> None:
    code = "import sys, cachefs_cluster.peers.__main__; print(*{'pydantic', 'aiohttp', 'grpc'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
