"""Jobs of a real Slurm go where their dataset is, and users' own wishes come first."""

from collections.abc import Iterator

import pytest

from cachefs_scheduler.slurm.hint import PLUGIN_DIRECTORY
from tests.scheduler.slurm.hinted import HintedSlurm, hinted_slurm
from tests.waiting import until

READS = "--comment=cachefs:imagenet"
DIRECTIVE = "#!/bin/sh\n#SBATCH --ntasks=4\n#CACHEFS dataset=imagenet@latest policy=prefer\nsleep 600\n"
WHOLE = "--ntasks=4"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HintedSlurm]:
    with hinted_slurm(tmp_path_factory.mktemp("s")) as hinted:
        yield hinted


@pytest.fixture
def hinted(started: HintedSlurm) -> Iterator[HintedSlurm]:
    """No jobs; imagenet is on two nodes."""
    started.hold(imagenet={"n3": 1.0, "n4": 1.0})
    yield started
    started.slurm.cancel_all()


def test_single_node_jobs_go_where_the_dataset_is_and_elsewhere_where_that_is_full(hinted: HintedSlurm) -> None:
    found = [hinted.run_on(WHOLE, READS)[1], hinted.run_on(script=DIRECTIVE)[1]]
    assert sorted(found) == [("n3",), ("n4",)]
    assert hinted.run_on(WHOLE, READS)[1] in (("n1",), ("n2",))


@pytest.mark.cluster
def test_twenty_of_twenty(hinted: HintedSlurm) -> None:
    found = []
    for _ in range(20):
        job, nodes = hinted.run_on(WHOLE, READS)
        found.append(nodes)
        hinted.cancel(job)
    assert set(found) <= {("n3",), ("n4",)}


def test_jobs_on_more_nodes_get_all_that_hold_it(hinted: HintedSlurm) -> None:
    job, nodes = hinted.run_on("--nodes=2", READS)
    assert nodes == ("n3", "n4")
    hinted.cancel(job)
    _, nodes = hinted.run_on("--nodes=3", READS)
    assert {"n3", "n4"} < set(nodes)


def test_how_many_nodes_tasks_need_is_known(hinted: HintedSlurm) -> None:
    assert hinted.run_on("--ntasks=8", READS)[1] == ("n3", "n4")


def test_the_better_node_is_taken_first(hinted: HintedSlurm) -> None:
    hinted.hold(coco={"n2": 0.4, "n4": 1.0}, imagenet={"n3": 1.0, "n4": 1.0})
    nodes = [hinted.run_on(WHOLE, "--comment=cachefs:coco")[1] for _ in range(2)]
    assert nodes == [("n4",), ("n2",)]


def test_the_constraint_of_the_user_is_honoured(hinted: HintedSlurm) -> None:
    slurm = hinted.slurm
    _give(hinted, "n1", "big")
    _give(hinted, "n3", "big")
    assert hinted.run_on(WHOLE, READS, "--constraint=big")[1] == ("n3",)
    # The other node that holds it is free, and not big.
    assert hinted.run_on(WHOLE, READS, "--constraint=big")[1] == ("n1",)
    assert hinted.run_on(WHOLE, READS, "--constraint=lab|big")[1] in (("n2",), ("n4",))
    assert "big" in slurm.node_features("n3")[1]


def test_what_the_user_prefers_or_names_is_left_alone(hinted: HintedSlurm) -> None:
    _give(hinted, "n2", "mine")
    assert hinted.run_on(WHOLE, READS, "--prefer=mine")[1] == ("n2",)
    assert hinted.run_on(WHOLE, READS, "--nodelist=n1")[1] == ("n1",)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("cachefs:imagenet,policy=sooner", "no policy: sooner (there are prefer, require, suspend, clone)"),
        ("cachefs:../x", "no name of a dataset: ../x"),
        ("cachefs:", "no name of a dataset: "),
        ("cachefs:imagenet,policy", "nothing is said of policy; write policy=VALUE, without blanks"),
        ("cachefs:imagenet, policy=suspend", "nothing is said of ; write =VALUE, without blanks"),
        ("cachefs:other", ""),
    ],
)
def test_a_strange_wish_stops_no_job_and_is_told_to_who_submits_it(hinted: HintedSlurm, words: str, said: str) -> None:
    done = hinted.slurm.try_command(
        "sbatch", "--parsable", "--output=/dev/null", f"--comment={words}", "--wrap=sleep 600"
    )
    assert done.stderr.strip() == (f"sbatch: cachefs: {said}; the job is taken as it is" if said else "")
    assert hinted.nodes_of(int(done.stdout))


def test_features_come_back_after_a_reconfiguration_and_a_restart(hinted: HintedSlurm) -> None:
    slurm = hinted.slurm
    # With features, this program's or others', gone, as scontrol has set them.
    slurm.run_command("scontrol", "reconfigure")
    until(lambda: "cachefs_imagenet_some" in slurm.node_features("n4")[1], "features are back")
    slurm.stop_controller()
    slurm.start_controller()
    until(lambda: "cachefs_imagenet_some" in slurm.node_features("n4")[1], "features are back")
    available, active = slurm.node_features("n4")
    assert {"lab", *_ours()} <= available == active
    until(
        lambda: slurm.run_command("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * 4,
        "nodes are back",
    )
    assert hinted.run_on(WHOLE, READS)[1] in (("n3",), ("n4",))


def test_features_go_with_the_bytes(hinted: HintedSlurm) -> None:
    hinted.hold(imagenet={"n2": 1.0})
    assert not any(name.startswith("cachefs_") for name in hinted.slurm.node_features("n4")[0])
    hinted.service.parts = {node: {} for node in hinted.slurm.nodes}
    until(lambda: "cachefs_" not in hinted.slurm.run_command("sinfo", "--format=%f %b"), "none of our features is left")


def test_srun_says_in_its_environment_what_it_reads(hinted: HintedSlurm) -> None:
    slurm = hinted.slurm
    file = slurm.work / "cli_filter.lua"
    file.write_text((PLUGIN_DIRECTORY / "cli_filter.lua").read_text())
    # A configuration of who submits: the controller's has no filter.
    configuration = slurm.work / "submitting.conf"
    configuration.write_text(slurm.configuration.read_text() + "\nCliFilterPlugins=lua\n")
    run = ("env", "CACHEFS_DATASET=imagenet", f"SLURM_CONF={configuration}")
    said = slurm.run_command(*run, "srun", "--ntasks=4", "sh", "-c", "echo $SLURMD_NODENAME")
    assert set(said.split()) <= {"n3", "n4"}
    wrong = slurm.try_command(*run, "CACHEFS_POLICY=foo", "srun", "true")
    assert (wrong.returncode, "cachefs: no policy: foo" in wrong.stderr) == (0, True)


def test_lua_without_its_library_takes_jobs(hinted: HintedSlurm) -> None:
    library = hinted.slurm.work / "cachefs.lua"
    content = library.read_text()
    library.unlink()
    try:
        hinted.slurm.run_command("scontrol", "reconfigure")
        hinted.run_on(READS)
    finally:
        library.write_text(content)
        hinted.slurm.run_command("scontrol", "reconfigure")


def _give(hinted: HintedSlurm, node: str, feature: str) -> None:
    """As an administrator does: beside the features that are there."""
    available, _ = hinted.slurm.node_features(node)
    words = ",".join(sorted({*available, feature}))
    hinted.slurm.run_command(
        "scontrol", "update", f"NodeName={node}", f"AvailableFeatures={words}", f"ActiveFeatures={words}"
    )


def _ours() -> set[str]:
    return {"cachefs_imagenet_full", "cachefs_imagenet_some"}
