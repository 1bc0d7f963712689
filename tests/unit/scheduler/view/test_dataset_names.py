from cachefs_scheduler.view.dataset_names import DatasetNames, dataset_of

from cachefs.observe_messages import SnapshotReport


def report(snapshot: str, *datasets: str) -> SnapshotReport:
    return SnapshotReport(id=snapshot, total=1, blocks=1, datasets=list(datasets))


def test_a_name_means_what_most_nodes_say() -> None:
    names = DatasetNames()
    names.follow("n1", [report("old", "set"), report("x", "other")])
    names.follow("n2", [report("new", "set")])
    names.follow("n3", [report("new", "set")])
    assert names.snapshot("set") == names.snapshot("set@latest") == "new"
    assert names.snapshot("set@ol") == "old"
    assert names.snapshot("set@z") is None
    assert names.snapshot("unknown") is None
    assert names.current() == {"set": "new", "other": "x"}
    names.follow("n2", [report("old", "set")])
    assert names.snapshot("set") == "old"
    for node in ("n1", "n2", "n3"):
        names.forget(node)
    assert names.names() == []


def test_the_dataset_of_a_spec() -> None:
    assert dataset_of("set@latest") == dataset_of("set") == "set"
