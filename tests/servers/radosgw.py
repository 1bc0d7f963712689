"""Ceph's S3 gateway, over one monitor and one OSD that keeps its objects in memory. It starts in a second.

It is the one server at hand that does all of S3 that cachefs relies on: If-Match, ranges, signatures and listing.

Some settings look odd, and were found by measuring. Without the messenger modes `crc` the gateway asks for a secure
connection, for which there are no keys. The `paxos` settings reduce the start from 11 s to 1 s. `tcp_nodelay` makes
small ranged reads four times as fast.

On a busy machine, a gateway sometimes listens and never answers. Then another one is started on the same objects.
"""

import atexit
import functools
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from cachefs_bench.lab.ports import free_port
from cachefs_bench.lab.scratch_node import memory_directory
from tests.servers.process import start, stop, wait_for_port
from tests.servers.s3 import S3Server
from tests.waiting import until

# Gateways that are started at most, and seconds in which one has to answer its first request.
_GATEWAYS = 3
_FIRST_ANSWER = 15.0
_INSTALL = "apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd ceph-common"

_CONFIGURATION = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port},v1:127.0.0.1:{mon_port_v1}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms cluster mode = crc
ms service mode = crc
ms client mode = crc
ms mon cluster mode = crc
ms mon service mode = crc
ms mon client mode = crc
run dir = {home}
admin socket = {home}/$name.asok
pid file = {home}/$name.pid
log file = {home}/$name.log
crash dir = {home}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
paxos propose interval = 0.02
paxos min wait = 0.01
mon lease = 2
mon warn on pool no redundancy = false
[mon.a]
mon data = {home}/mon
mon data avail crit = 1
mon data avail warn = 2
[osd.0]
osd data = {home}/osd0
osd objectstore = memstore
memstore device bytes = {capacity}
osd op num shards = 2
osd op num threads per shard = 2
osd class load list = *
osd class default list = *
[client.rgw.a]
rgw data = {home}/rgw
rgw enable apis = s3, admin
rgw dns name =
rgw thread pool size = 64
rgw run sync thread = false
rgw enable quota threads = false
debug rgw = 0
"""


@functools.cache
def shared() -> S3Server:
    """Return the server of this process and of those that it forks later. The server ends with this process."""
    servers, owner = ExitStack(), os.getpid()
    atexit.register(lambda: servers.close() if os.getpid() == owner else None)
    return servers.enter_context(running())


@contextmanager
def running(capacity: int = 4 << 30) -> Iterator[S3Server]:
    """An empty server on a loopback port. Its objects may take *capacity* bytes of memory."""
    missing = [name for name in ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool") if not _found(name)]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} missing: {_INSTALL}")
    # In /dev/shm, since the monitor syncs each step of the start to its disk.
    with memory_directory("cachefs-tests-rgw-") as home, ExitStack() as servers:
        yield _start(home, capacity, servers)


def _found(program: str) -> bool:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is not None


def _start(home: Path, capacity: int, servers: ExitStack) -> S3Server:
    fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
    mon_port, mon_port_v1 = free_port(), free_port()
    for name in ("mon", "osd0", "rgw"):
        (home / name).mkdir()
    (home / "ceph.conf").write_text(
        _CONFIGURATION.format(fsid=fsid, home=home, capacity=capacity, mon_port=mon_port, mon_port_v1=mon_port_v1)
    )
    env = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "CEPH_CONF": str(home / "ceph.conf")}
    log = home / "output"

    def run(*command: str) -> None:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout.decode(errors='replace')[-2000:]}")

    def serve(*command: str) -> subprocess.Popen[bytes]:
        process = start(command, log, env)
        servers.callback(stop, process, 0.5)
        return process

    addresses = f"[v2:127.0.0.1:{mon_port},v1:127.0.0.1:{mon_port_v1}]"
    run("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", addresses, f"{home}/monmap")
    run("ceph-mon", "-i", "a", "--mkfs", "--monmap", f"{home}/monmap")
    monitor = serve("ceph-mon", "-i", "a", "-f")
    wait_for_port(mon_port, monitor, log)
    run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
    run("ceph", "osd", "new", osd)
    _wait_until_active(home / "osd.0.log", serve("ceph-osd", "-i", "0", "-f"))
    access_key, secret_key = "tester", "secretsecretsecret"
    run(
        "radosgw-admin", "user", "create", "--uid", "tester", "--display-name", "tester",
        "--access-key", access_key, "--secret-key", secret_key,
    )  # fmt: skip
    for _ in range(_GATEWAYS):
        port = free_port()
        frontend = f"--rgw-frontends=beast endpoint=127.0.0.1:{port} tcp_nodelay=1"
        gateway = serve("radosgw", "-n", "client.rgw.a", "-f", frontend)
        wait_for_port(port, gateway, log)
        if _answers(port):
            return S3Server(f"http://127.0.0.1:{port}", access_key, secret_key)
        stop(gateway, 0.5)
    raise RuntimeError(f"none of {_GATEWAYS} gateways answers within {_FIRST_ANSWER:.0f} s:\n{log.read_text()[-2000:]}")


def _answers(port: int) -> bool:
    """Whether the gateway answers its first request."""
    connection = HTTPConnection("127.0.0.1", port, timeout=_FIRST_ANSWER)
    try:
        connection.request("GET", "/")
        connection.getresponse()
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return True


def _wait_until_active(log: Path, osd: subprocess.Popen[bytes]) -> None:

    def is_active() -> bool:
        assert osd.poll() is None, f"the OSD has ended; see {log}"
        return log.exists() and "state: booting -> active" in log.read_text(errors="replace")

    until(is_active, f"the OSD starts; see {log}")
