"""The dashboard and the alert rules: what they ask for exists, and each alert comes when it should."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cachefs_daemon.metrics.table import TABLE

REPOSITORY = Path(__file__).parents[4]
DIRECTORY = REPOSITORY / "daemon" / "deploy" / "monitoring"
# Prometheus' own, of the process.
PROCESS = {"up", "process_open_fds", "process_max_fds", "process_cpu_seconds_total", "process_resident_memory_bytes"}
KNOWN = {metric.full_name: metric for metric in TABLE}


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=DIRECTORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def board() -> dict[str, object]:
    found: dict[str, object] = json.loads((DIRECTORY / "dashboard.json").read_text())
    return found


def shown() -> Iterator[str]:
    """What the dashboard asks for, with values in place of its variables."""
    panels = board()["panels"]
    assert isinstance(panels, list)
    for panel in panels:
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")


def rules() -> list[dict[str, str]]:
    (group,) = yaml.safe_load((DIRECTORY / "alerts.yml").read_text())["groups"]
    found: list[dict[str, str]] = group["rules"]
    return found


def selected(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The metrics of an expression, with what it wants of their labels."""
    for name, labels in re.findall(r"\b(up|(?:cachefs|process)_\w+)(?:\{([^}]*)\})?", expression):
        yield name, dict(re.findall(r'(\w+)!?[=~]+"([^"]*)"', labels))


@pytest.mark.parametrize("expression", [*shown(), *(rule["expr"] for rule in rules())])
def test_what_is_asked_for_exists(expression: str) -> None:
    found = list(selected(expression))
    assert found
    for name, labels in found:
        if name in PROCESS:
            continue
        bounds = {label.name: label for label in KNOWN[name].labels}
        for label, wanted in labels.items():
            if label not in ("instance", "job"):
                assert all(value in bounds[label].values for value in wanted.split("|")), (name, label, wanted)
        for group in re.findall(r"by \(([^)]*)\)", expression):
            others = {label.name for each, _ in found if each in KNOWN for label in KNOWN[each].labels}
            assert set(group.split(", ")) <= {"instance", *others}


def test_prometheus_understands_what_the_dashboard_asks_for(tmp_path: Path) -> None:
    asked = [{"record": f"shown:{number}", "expr": one} for number, one in enumerate(shown())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": asked}]}))
    promtool("check", "rules", str(tmp_path / "rules.yml"))


def test_each_rule_is_right_and_comes_when_it_should() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")
    promtool("test", "rules", "alerts_test.yml")
    tried = yaml.safe_load((DIRECTORY / "alerts_test.yml").read_text())["tests"]
    fires = {one["alertname"] for test in tried for one in test["alert_rule_test"] if one["exp_alerts"]}
    assert fires == {rule["alert"] for rule in rules()}, "each alert has a test in which it fires"


def test_the_manual_says_of_each_alert_what_to_do() -> None:
    page = (REPOSITORY / "docs" / "monitoring.md").read_text()
    for rule in rules():
        anchor = rule["annotations"]["runbook"].removeprefix("docs/monitoring.md#")  # type: ignore[index]
        assert f'<a id="{anchor}"></a>`{rule["alert"]}`' in page, rule["alert"]


def test_the_panels_have_places_of_their_own() -> None:
    panels = board()["panels"]
    assert isinstance(panels, list)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == len(panels)
