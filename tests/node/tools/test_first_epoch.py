"""`cachefs-bench first-epoch` with a few files. It takes some seconds: a server, a node and a download are started."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(sys.executable).with_name("cachefs-bench")


def test_an_epoch_is_measured_beside_a_download(tmp_path: Path) -> None:
    done = subprocess.run(
        [BENCH, "first-epoch", "--files", "100", "--size", "3000", "--turns", "1", "--directory", str(tmp_path)],
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "turn 1 of 1: a download ..." in done.stderr
    found = json.loads(done.stdout)
    (turn,) = found["turns"]
    assert found["files"] == 100
    assert turn["samples_per_s"] > 0
    assert turn["download_per_s"] > 0
    assert found["to_download"] > 0
    assert list(tmp_path.iterdir()) == []
