"""The jobs of `cachefs-bench train`, without a node: what they read, check and report. And the runs of its presets."""

import subprocess
import sys
from pathlib import Path

import pytest

from cachefs_bench.job_samples import list_samples
from cachefs_bench.sample_data import is_sample, sample_name, write_samples
from cachefs_bench.scenario import PRESETS, DatasetShape, JobLoader, Scenario, preset_scenarios
from cachefs_bench.training_run import JobResult, merged_sequence
from cachefs_tools.training_loop import EpochReport, read_report
from tests.warm_python import WarmPython

FILES, EPOCHS = 210, 2


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_samples(tmp_path / "data", FILES, 300)
    return tmp_path / "data"


def run(jobs: WarmPython, script: str, data: Path, *more: str) -> list[EpochReport]:
    report = data.parent / "report.jsonl"
    program = f"from cachefs_bench.{script} import main; main()"
    line = [sys.executable, "-c", program, data, "--report", report, "--epochs", str(EPOCHS), "--batch-size", "16",
            "--workers", "2", "--prefetch", "2", "--seed", "3", "--demand", "5000", *more]  # fmt: skip
    with jobs.start(line, stdin=subprocess.PIPE) as job:
        job.communicate("go\n")
    assert job.returncode == 0
    return read_report(report)


def test_samples_are_listed_in_order_and_prove_themselves(data: Path) -> None:
    listed = [path for path, _ in list_samples(str(data))]
    assert listed == [f"{data}/{sample_name(number)}" for number in range(FILES)]
    content = Path(listed[7]).read_bytes()
    assert len(content) == 300
    assert is_sample(content, 7)
    assert not is_sample(content, 8)
    assert not is_sample(content[:-1], 7)
    assert not is_sample(content[:100] + b"?" + content[101:], 7)
    assert not is_sample(b"", 7)


@pytest.mark.parametrize("script", [pytest.param("plain_job", marks=pytest.mark.soak), "torch_job"])
def test_a_job_reports_every_epoch(torch_jobs: WarmPython, data: Path, script: str) -> None:
    epochs = run(torch_jobs, script, data)
    assert [epoch.epoch for epoch in epochs] == [0, 1]
    for epoch in epochs:
        assert (epoch.samples, epoch.damaged) == (FILES, 0)
        assert len(epoch.batches) == len(epoch.waits) == -(-FILES // 16)
        assert epoch.begin <= epoch.batches[0]
        assert epoch.batches == sorted(epoch.batches)
        assert epoch.end - epoch.begin >= FILES / 5000 + sum(epoch.waits)
        assert 0 < epoch.read_p50 <= epoch.read_p99 <= epoch.read_longest


def test_a_job_notices_what_is_damaged(torch_jobs: WarmPython, data: Path) -> None:
    path = data / sample_name(11)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    (data / sample_name(12)).write_bytes((data / sample_name(13)).read_bytes())
    assert [epoch.damaged for epoch in run(torch_jobs, "plain_job", data)] == [2, 2]


@pytest.mark.soak
def test_a_job_stops_when_told(torch_jobs: WarmPython, data: Path) -> None:
    (epoch,) = run(torch_jobs, "torch_job", data, "--batches", "4")
    assert (epoch.epoch, epoch.samples) == (0, 64)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_runs_of_different_names(name: str) -> None:
    runs = preset_scenarios(name, Scenario(title="", shape=DatasetShape(files=100)))
    assert len({one.title for one in runs}) == len(runs) > 1
    assert {one.shape.files for one in runs} == {400 if name == "fast" else 100}
    assert all(one.limits.bandwidth > 0 for one in runs)


def test_the_merged_sequence_follows_the_clock() -> None:
    scenario = Scenario(title="", loader=JobLoader.PLAIN, shape=DatasetShape(files=6, batch_size=2, epochs=1))
    early = EpochReport(0, begin=0, samples=6, begins=[1.0, 1.1, 3.0, 3.1, 5.0, 5.1])
    late = EpochReport(0, begin=0, samples=4, begins=[2.1, 2.0, 4.0, 4.1])
    jobs = [JobResult(scenario.jobs[0], [early]), JobResult(scenario.jobs[0], [late])]
    order = merged_sequence(scenario, jobs[:1])[0].tolist()
    assert sorted(order) == list(range(6))
    merged, known = (array.tolist() for array in merged_sequence(scenario, jobs))
    assert merged == [*order[:2], order[1], order[0], *order[2:4] * 2, *order[4:]]
    assert known == [0, 0, 2, 2, 0, 0, 2, 2, 0, 0]
