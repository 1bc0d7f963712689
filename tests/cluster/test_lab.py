"""The lab: hosts see each other, what is cut or lost does not arrive, and nothing is left, however it ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cachefs.errors import CachefsError
from cachefs_bench.lab.bridge import bridge_network
from cachefs_bench.lab.cluster import run_etcd
from cachefs_bench.lab.host import LOOPBACK, LabHost
from cachefs_bench.lab.switch import switched_network
from tests.waiting import until

SECONDS = 20.0


def reaches(source: LabHost, listener: socket.socket, seconds: float = SECONDS) -> bool:
    """Can a process on that host connect?"""

    def connect() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(listener.getsockname(), seconds):
            return True
        return False

    return source.run_in_network(connect)


def test_hosts_on_a_bridge() -> None:
    with bridge_network(3) as network, network.hosts[1].listen() as listener:
        one, _, three = network.hosts
        assert reaches(one, listener)
        assert reaches(network.hub, listener)
        network.cut_host(1, hub=False)
        assert not reaches(one, listener, 0.2)
        assert reaches(network.hub, listener)
        network.cut_host(1)
        assert not reaches(network.hub, listener, 0.2)
        network.restore_links()
        assert reaches(three, listener)
        network.drop_packets(1, 1.0)
        assert not reaches(one, listener, 0.2)
        assert reaches(network.hub, listener)
        network.restore_links()
        network.limit_bandwidth(1, 100)
        network.set_offload(False)
        assert reaches(one, listener)
        network.set_offload(True)
        network.remove_limit(1)
        assert reaches(one, listener)


def test_two_networks_at_once_do_not_see_each_other() -> None:
    with bridge_network(1) as network, network.hosts[0].listen() as listener, bridge_network(1) as other:
        assert reaches(network.hub, listener)
        assert not reaches(other.hub, listener, 0.2)


def test_hosts_on_a_switch() -> None:
    with switched_network(2) as network, network.hosts[1].listen() as listener:
        assert reaches(network.hosts[0], listener)
        network.delay_frames(0.05)
        begin = time.monotonic()
        assert reaches(network.hosts[0], listener)
        assert time.monotonic() - begin > 0.1  # there and back
        network.cut_host(1, hub=False)
        assert not reaches(network.hosts[0], listener, 0.2)
        assert reaches(network.hub, listener)
        network.cut_host(1)
        assert not reaches(network.hub, listener, 0.2)
        network.restore_links()
        network.delay_frames(0)
        assert reaches(network.hosts[0], listener)


def test_a_mount_of_a_host_is_seen_there_only(tmp_path: Path) -> None:
    with bridge_network(1) as network:
        (host,) = network.hosts
        host.run_command("mount", "-t", "tmpfs", "none", str(tmp_path))
        host.run_command("touch", str(tmp_path / "there"))
        assert (host.path_from_outside(tmp_path) / "there").exists()
        assert not (tmp_path / "there").exists()


def test_nothing_is_left_of_a_lab_whose_process_was_killed() -> None:
    program = (
        "import time\nfrom cachefs_bench.lab.bridge import bridge_network\n"
        "with bridge_network(2) as network:\n"
        "    print(network.hub.pid, *(host.pid for host in network.hosts), flush=True)\n    time.sleep(60)\n"
    )
    lab = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert lab.stdout is not None
    pids = [int(pid) for pid in lab.stdout.readline().split()]
    assert len(pids) == 3
    lab.send_signal(signal.SIGKILL)
    lab.wait()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(CachefsError, match="No such file"):
        LOOPBACK.run_command("ls", "/does/not/exist")
    with pytest.raises(CachefsError, match="does-not-exist is missing"):
        LOOPBACK.run_command("does-not-exist")


def test_ports_in_a_row_are_free() -> None:
    ports = LOOPBACK.free_ports(3)
    assert len(ports) == 3
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_who_is_not_root_is_told_so() -> None:
    program = (
        "from cachefs_bench.orderly_exit import orderly_exit\nfrom cachefs_bench.lab.bridge import bridge_network\n"
        "with orderly_exit('lab'), bridge_network(2):\n    pass\n"
    )
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups") if os.geteuid() == 0 else ()
    done = subprocess.run([*nobody, sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "lab: nodes in network namespaces need root: run this with sudo, or in a container as root\n"


def test_an_etcd_that_is_started_again_has_its_data(tmp_path: Path) -> None:
    with run_etcd(LOOPBACK, tmp_path / "etcd") as etcd:
        LOOPBACK.run_command("etcdctl", "--endpoints", etcd.endpoint, "put", "key", "value")
        etcd.stop()
        etcd.start()
        assert "value" in LOOPBACK.run_command("etcdctl", "--endpoints", etcd.endpoint, "get", "key")
