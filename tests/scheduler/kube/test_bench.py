"""`cachefs-bench extender` measures all that it says."""

import json
import subprocess
import sys
from pathlib import Path

COMMAND = Path(sys.executable).with_name("cachefs-bench")


def test_it_prints_one_document_with_all_figures() -> None:
    command = [COMMAND, "extender", "--nodes", "40", "--questions", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["nodes"] == 40
    assert {"filter", "filter_require", "prioritize", "prioritize_gang_of_64"} <= set(found["names"])
    assert found["names"]["prioritize"]["count"] == 20
    assert len(found["whole_nodes"]) == 2
    for each in found["whole_nodes"].values():
        assert 0 < each["filter"]["p50_ms"] <= each["filter"]["p99_ms"] <= each["filter"]["max_ms"]
    assert found["names_while_another_asks_with_whole_nodes"]["prioritize"]["count"] == 20
