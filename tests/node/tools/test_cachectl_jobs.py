"""cachectl job and cachectl stalls as a user runs them."""

from pathlib import Path

import numpy as np

from cachefs.messages import Stall
from tests.daemon import Daemon
from tests.node.daemon.test_jobs import keys_in_path_order, write_files
from tests.node.tools.test_cachectl import SMALL, answer, run
from tests.waiting import until


def test_publish_show_stalls_and_cancel(tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 60, size=1000)
    with Daemon(tmp_path / "node", SMALL) as daemon:
        keys = keys_in_path_order(daemon.add_dataset("images", f"file://{tmp_path}/origin"))
        assert "no job has published anything" in run(daemon, "job", "list").stdout
        view = answer(
            daemon, "job", "publish", "train", "images", "--sampler", "torch-distributed", "--epochs", "3",
            "--world-size", "4", "--rank", "0-2", "--workers", "2", "--batch-size", "4",
        )  # fmt: skip
        assert [consumer["consumer"] for consumer in view["consumers"]] == ["0", "1", "2"]
        until(lambda: answer(daemon, "job", "show", "train")["consumers"][2]["epoch_length"] == 15)
        assert answer(daemon, "job", "list")["jobs"][0]["job"] == "train"
        daemon.report(stalls=[Stall(keys[0], 0.5, "ssd")])
        rows = answer(daemon, "stalls")["rows"]
        assert [(row["source"], row["count"], row["seconds"]) for row in rows] == [("ssd", 1, 0.5)]
        assert "500 ms" in run(daemon, "stalls").stdout
        text = run(daemon, "job", "show", "train").stdout
        assert "train: running" in text
        assert "waiting" in text
        assert "train has weight 2" in run(daemon, "job", "priority", "train", "2").stdout
        assert answer(daemon, "job", "show", "train")["weight"] == 2
        assert "weight 2" in run(daemon, "job", "show", "train").stdout
        refused = run(daemon, "job", "priority", "train", "0")
        assert (refused.returncode, "expected 0.01 to 100" in refused.stderr) == (1, True)
        assert "train is cancelled" in run(daemon, "job", "cancel", "train").stdout
        assert answer(daemon, "job", "show", "train")["state"] == "cancelled"
        assert "only a running job has a weight" in run(daemon, "job", "priority", "train", "2").stderr
        assert run(daemon, "job", "show", "nobody").returncode == 1


def test_explicit_orders_and_lists_of_files(tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 20, size=1000)
    np.save(tmp_path / "first.npy", np.array([2, 0, 1]))
    (tmp_path / "second.txt").write_text("1\n0\n2\n")
    with Daemon(tmp_path / "node", SMALL) as daemon:
        daemon.add_dataset("images", f"file://{tmp_path}/origin")
        orders = ("--order", tmp_path / "first.npy", "--order", tmp_path / "second.txt")
        options = ("job", "publish", "train", "images", "--sampler", "explicit", "--files", "-")
        answer(daemon, *options, *orders, stdin=b"00007\n00003\n00011\n")
        until(lambda: daemon.status().fetched_blocks == 3)
        [consumer] = answer(daemon, "job", "show", "train")["consumers"]
        assert (consumer["known_epochs"], consumer["epoch_length"], consumer["problem"]) == ([[0, 1]], 3, "")
        usage = run(daemon, *options[:-2])
        assert usage.returncode == 2
        assert "--order and --sampler explicit need each other" in usage.stderr
        (tmp_path / "bad.txt").write_text("one\n")
        bad = run(daemon, *options, "--order", tmp_path / "bad.txt", stdin=b"00007\n")
        assert "bad.txt is not an order of samples" in bad.stderr
