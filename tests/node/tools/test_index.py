"""cachectl index, beside a real web server."""

import hashlib
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cachefs_tools.cachectl import main
from cachefs_tools.cachectl.index import trusted_authorities
from tests.servers import faulty, nginx
from tests.servers.stores import FilesServer, running


@pytest.fixture
def web(tmp_path: Path) -> Path:
    directory = tmp_path / "web"
    (directory / "a b").mkdir(parents=True)
    (directory / "a b/ü%20#").write_bytes(b"12345")
    (directory / "empty").touch()
    (directory / "link").symlink_to("empty")
    return directory


@pytest.fixture
def url(web: Path) -> Iterator[str]:
    with nginx.running(web) as found:
        yield found


def index(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["index", *(str(argument) for argument in arguments)])


def lines(path: Path) -> dict[str, dict[str, object]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {line.pop("path"): line for line in found}


def test_every_file_has_a_line(web: Path) -> None:
    for _ in range(2):  # the index itself has none
        done = index(web)
        assert done.exit_code == 0, done.output
        found = lines(web / "index.jsonl")
        assert list(found) == ["empty", "link", "a b/ü%20#"]
        assert found["a b/ü%20#"] == {
            "size": 5,
            "sha256": hashlib.sha256(b"12345").hexdigest(),
            "mtime": os.stat(web / "a b/ü%20#").st_mtime,
        }
    assert sorted(path.name for path in web.iterdir()) == ["a b", "empty", "index.jsonl", "link"]


def test_a_server_is_asked_for_etags(web: Path, url: str, tmp_path: Path) -> None:
    done = index(web, "--url", f"{url}/", "--output", tmp_path / "other")
    assert done.exit_code == 0, done.output
    assert all(line["etag"] for line in lines(tmp_path / "other").values())
    assert not (web / "index.jsonl").exists()


def test_a_url_of_something_else_leaves_no_index(web: Path, url: str) -> None:
    done = index(web, "--url", f"{url}/a%20b")
    assert done.exit_code == 1
    assert "is this the URL of the directory?" in done.output
    assert sorted(path.name for path in web.iterdir()) == ["a b", "empty", "link"]


def test_large_files_without_an_etag_are_told(web: Path) -> None:
    with (web / "large").open("wb") as file:
        file.truncate((4 << 20) + 1)
    done = index(web)
    assert done.exit_code == 0
    assert "1 file has more than a block (4 MiB) and no ETag, and cannot be read: use --url" in done.output


def test_a_server_is_believed_by_the_certificates_that_the_daemon_believes(
    web: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = Path(faulty.__file__).parent / "localhost.pem"
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    server = FilesServer()
    trusted_authorities.cache_clear()
    with running(server, tls=tls):
        done = index(web, "--url", server.endpoint)
        assert "certificate is not trusted" in done.output
        assert "REQUESTS_CA_BUNDLE" in done.output
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        trusted_authorities.cache_clear()
        assert "status 404" in index(web, "--url", server.endpoint).output
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none"))
        trusted_authorities.cache_clear()
        assert "REQUESTS_CA_BUNDLE" in index(web, "--url", server.endpoint).output
    trusted_authorities.cache_clear()


def test_what_cannot_be_listed_is_said(web: Path, tmp_path: Path) -> None:
    os.mkfifo(web / "fifo")
    done = index(web)
    assert done.exit_code == 4
    assert "skipped 'fifo'" in done.output
    assert index(tmp_path / "none").exit_code == 1


def test_what_is_no_file_is_not_replaced(web: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = index(web, "--output", tmp_path / "pipe")
    assert done.exit_code != 0
    assert "is not a regular file" in done.output
    assert (tmp_path / "pipe").is_fifo()
