"""`cachefs-bench extender` measures all that it says."""

import json

from cachefs_bench.cli import main
from tests.cachectl import run_here


def test_it_prints_one_document_with_all_figures() -> None:
    done = run_here(main, "cachefs-bench", ["extender", "--nodes", "40", "--questions", "20"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["nodes"] == 40
    assert {"filter", "filter_require", "prioritize", "prioritize_gang_of_64"} <= set(found["names"])
    assert found["names"]["prioritize"]["count"] == 20
    assert len(found["whole_nodes"]) == 2
    for each in found["whole_nodes"].values():
        assert 0 < each["filter"]["p50_ms"] <= each["filter"]["p99_ms"] <= each["filter"]["max_ms"]
    assert found["names_while_another_asks_with_whole_nodes"]["prioritize"]["count"] == 20
