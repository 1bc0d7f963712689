"""Keys of objects that people have: each that a path can have reads back, and the others are named."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from cachefs.messages import OriginOptions
from cachefs_tools import cachectl
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.servers.s3 import S3Server

KEYS = [
    "plain.jpg", "a b.jpg", "trailing ", " leading.jpg", "plus+plus.jpg", "per%20cent.jpg", "per%.jpg", "query?x=1.jpg",
    "hash#1.jpg", "semi;colon.jpg", "col:on.jpg", "at@x.jpg", "eq=1&b=2.jpg", "quote'\".jpg", "star*.jpg",
    "par(en)[br]{ace}.jpg", "back\\slash.jpg", "tilde~.jpg", "caret^`|.jpg", "<lt>&amp;.jpg", "tab\there.jpg",
    "new\nline.jpg", "-dash.jpg", "..hidden", "...", ".dot", "caf\u00e9.jpg", "cafe\u0301.jpg",
    "\u65e5\u672c\u8a9e.jpg", "\U0001f600.jpg", "\u202ertl.jpg", "\ufeffbom.jpg", "x\u2028y.jpg", "n" * 255,
    "\u00e9" * 127, "/".join(letter * 200 for letter in "def"), "CON", "dir_$folder$", "dup", "DUP", "marked/in.jpg",
]  # fmt: skip
# What a file system cannot show.
OTHERS = ["a//b.jpg", "x/../y.jpg", "x/./z.jpg", "m" * 256]


@pytest.fixture(scope="module")
def bucket(radosgw: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Path]]:
    radosgw.create_bucket("field-keys")
    radosgw.put("field-keys", {key: key.encode() * 3 for key in (*KEYS, *OTHERS)} | {"marked/": b"", "empty/": b""})
    home = tmp_path_factory.mktemp("keys")
    with Daemon(home / "n", environment=radosgw.environment) as daemon:
        options = OriginOptions(endpoint_url=radosgw.endpoint, region="us-east-1", addressing_style="path")
        daemon.add_dataset("keys", "s3://field-keys", options)
        with mounted(daemon.socket, "keys", home / "mnt") as mount:
            yield daemon, mount


def test_each_key_reads_back(bucket: tuple[Daemon, Path]) -> None:
    _, mount = bucket
    wrong = [key for key in KEYS if (mount / key).read_bytes() != key.encode() * 3]
    assert wrong == []


def test_a_directory_lists_each_key_once(bucket: tuple[Daemon, Path]) -> None:
    _, mount = bucket
    listed = sorted(os.listdir(mount))
    assert listed == sorted({key.split("/")[0] for key in KEYS} | ({"empty"} & {*listed}))


def test_a_key_that_no_path_can_have_is_named(bucket: tuple[Daemon, Path]) -> None:
    daemon, _ = bucket
    command = ["--socket", str(daemon.socket), "dataset", "show", "keys", "--json"]
    shown = CliRunner().invoke(cachectl.main, command).stdout
    assert [key for key in OTHERS if key not in shown] == []
