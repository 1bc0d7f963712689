"""Publishing where there is neither a mount nor a daemon: nothing is raised, and nothing of the job is held."""

import contextlib
import os
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

from tests.helper_process import helper_process
from tests.waiting import until


def alone(code: str) -> subprocess.CompletedProcess[str]:
    """Run the code where there is neither a mount nor a daemon."""
    line = [sys.executable, "-c", "import cachefs, time\n" + textwrap.dedent(code)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def test_nothing_is_raised_where_nothing_can_be_published(tmp_path: Path) -> None:
    done = alone(
        f"""
        publication = cachefs.publish([{str(tmp_path / "file")!r}])
        publication.order(0, ["no number"])
        publication.order(0, [0])
        publication.progress(0, 1)
        publication.close()
        nowhere = cachefs.publish({str(tmp_path / "nowhere")!r})
        nowhere.order(0, [0])
        deadline = time.monotonic() + 60
        while not nowhere._channel.page.log_length and time.monotonic() < deadline:
            time.sleep(0.01)
        """
    )
    assert done.returncode == 0
    first, second = done.stderr.splitlines()
    assert "cannot publish the order of epoch 0 ('str' object cannot be interpreted as an integer)" in first
    assert "nowhere: No such file or directory" in second


def test_no_argument_ends_a_training_loop() -> None:
    done = alone(
        """
        import numpy
        files = ["/nowhere/a", "/nowhere/b"]
        huge = 1 << 70
        p = cachefs.publish(files, workers=numpy.int64(2), rank=numpy.int8(1), world_size=numpy.uint8(3))
        for epoch in (0, numpy.int64(1), int(time.time()), 1 << 24, -2, huge, 1.0, "0", None):
            for samples in ([0, 1], range(2), numpy.array([1, 0], numpy.int16), [numpy.int64(1)], [0.5], [-1], [huge],
                            numpy.zeros(2), numpy.array([-1]), "01", None, 7, [None], [[0, 1]]):
                p.order(epoch, samples)
            for position in (0, numpy.int32(1), 1.0, -1, huge, None):
                p.progress(epoch, position)
            sampler = cachefs.PublishedSampler(type("S", (list,), {"epoch": epoch})([0, 1]), files, workers=1.5)
            assert list(sampler) == [0, 1]
        for spec in (3, {"kind": "numpy", "size": huge}, cachefs.SamplerSpec(kind="numpy", size=2, seed=0.5), "x"):
            cachefs.publish(files, sampler=spec)
        for options in ({"rank": -1}, {"batch_size": 0}, {"prefetch": huge}, {"records": 3}, {"consumer": 3}):
            cachefs.publish(files, **options).close()
        for none in ([3], 3, None, ["a\\0b"], ["\\ud800"], object(), b"x"):
            cachefs.publish(none).order(0, [0])
        assert p._is_open
        print("the end")
        """
    )
    assert done.stdout == "the end\n"
    (complaint,) = [line for line in done.stderr.splitlines() if "this is not published" in line]
    assert complaint.startswith("cachefs: cannot publish the order of epoch 0 ('float' object cannot be interpreted")


def test_files_that_are_none_are_named() -> None:
    done = alone("cachefs.publish([3])")
    assert done.returncode == 0
    assert "cachefs: cannot publish (list does not tell which files its samples are; pass their paths)" in done.stderr


def test_nothing_of_the_job_is_held(tmp_path: Path) -> None:
    """The helper is no child of the job, has nothing of the job open, and ends with it, also with kill -9."""
    code = """
import cachefs, os, time
held = open("held", "w")
os.set_inheritable(held.fileno(), True)
cachefs.publish(["/nowhere/a"]).order(0, [0])
try:
    os.wait()
except ChildProcessError:
    print("no child", flush=True)
time.sleep(60)
"""
    job = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "no child\n"
        helper = helper_process(job.pid)
        assert helper is not None
        until(lambda: helper.cwd() == "/")  # it may just have begun
        ours = {"/dev/null", "anon_inode:[eventpoll]", "/memfd:cachefs-page (deleted)"}
        assert open_files(helper.pid) & open_files(job.pid) <= ours
        helper.suspend()
    finally:
        job.kill()
    assert job.communicate(timeout=60) == ("", "")  # nobody else has them open
    helper.resume()
    until(lambda: not helper.is_running())


def test_a_helper_that_was_killed_leaves_nothing_once_its_job_has_ended(tmp_path: Path) -> None:
    code = """
import cachefs
from cachefs.publishing.channel import own_channel
publication = cachefs.publish(["/nowhere/a"])
publication.order(0, [0])
print(own_channel().directory, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        try:
            assert job.stdout is not None
            directory = Path(job.stdout.readline().strip())
            helper = helper_process(job.pid)
            assert helper is not None
            helper.kill()
            until(lambda: not helper.is_running())
            assert directory.exists()
            job.communicate("\n", timeout=60)
        finally:
            job.kill()
    assert job.returncode == 0
    assert not directory.exists()


def open_files(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found.add(os.readlink(path))
    return found


def test_a_full_dev_shm_kills_no_training() -> None:
    code = """
import cachefs
publication = cachefs.publish(["/nowhere/a"])
publication.order(0, [0])
publication.progress(0, 1)
print("the end")
"""
    mount = "mount -t tmpfs -o size=64k,mode=1777 none /dev/shm && ! head -c 1m /dev/zero 2>/dev/null > /dev/shm/full"
    done = subprocess.run(
        [
            "unshare",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            f'{mount} && exec "$@"',
            "sh",
            sys.executable,
            "-c",
            code,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/nowhere/python", "cannot publish ([Errno 2] No such file or directory: '/nowhere/python')"),
        ("/bin/false", "cannot publish (/bin/false cannot run"),
        ("empty", "publishing has failed (ModuleNotFoundError(\"No module named '"),
    ],
)
def test_a_python_that_cannot_run_the_helper_costs_a_line(tmp_path: Path, python: str, said: str) -> None:
    if python == "empty":
        venv.create(tmp_path / "empty", with_pip=False)
        python = str(tmp_path / "empty" / "bin" / "python")
    done = alone(
        f"""
        import os
        os.environ["CACHEFS_PYTHON"] = {python!r}
        publication = cachefs.publish(["/nowhere/a"])
        deadline = time.monotonic() + 60
        while publication._channel and not publication._channel.page.log_length and time.monotonic() < deadline:
            time.sleep(0.01)
        """
    )
    assert done.returncode == 0
    (complaint,) = done.stderr.splitlines()
    assert complaint.startswith(f"cachefs: {said}")
