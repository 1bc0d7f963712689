"""Ceph's S3 gateway, over one monitor and one OSD that keeps its objects in memory. It starts in a second.

It is the one server at hand that does all of S3 that cachefs relies on: If-Match, ranges, signatures and listing.

Some settings look odd, and were found by measuring. Without the messenger modes `crc` the gateway asks for a secure
connection, for which there are no keys. The `paxos` settings reduce the start from 11 s to 1 s. `tcp_nodelay` makes
small ranged reads four times as fast.
"""

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cachefs_tools.scratch_node import memory_directory

from tests.servers.process import free_port, start, stop, wait_for_port
from tests.servers.s3 import S3Server

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
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw enable apis = s3, admin
rgw dns name =
rgw thread pool size = 64
rgw run sync thread = false
rgw enable quota threads = false
debug rgw = 0
"""


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
    port, mon_port, mon_port_v1 = free_port(), free_port(), free_port()
    for name in ("mon", "osd0", "rgw"):
        (home / name).mkdir()
    (home / "ceph.conf").write_text(
        _CONFIGURATION.format(
            fsid=fsid, home=home, capacity=capacity, port=port, mon_port=mon_port, mon_port_v1=mon_port_v1
        )
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
    server = S3Server(f"http://127.0.0.1:{port}", "tester", "secretsecretsecret")
    run(
        "radosgw-admin", "user", "create", "--uid", "tester", "--display-name", "tester",
        "--access-key", server.access_key, "--secret-key", server.secret_key,
    )  # fmt: skip
    gateway = serve("radosgw", "-n", "client.rgw.a", "-f")
    wait_for_port(port, gateway, log)
    return server


def _wait_until_active(log: Path, osd: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and osd.poll() is None:
        if log.exists() and "state: booting -> active" in log.read_text(errors="replace"):
            return
        time.sleep(0.02)
    raise RuntimeError(f"the OSD does not start; see {log}")
