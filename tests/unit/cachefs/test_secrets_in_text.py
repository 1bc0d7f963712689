"""What people see of URLs proves to no server who asks."""

import json
import logging

import pytest

from cachefs.errors import CachefsError, OriginUnavailable, public_url, remove_secrets
from cachefs.messages import OriginOptions
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.origin.kinds import open_origin
from cachefs_daemon.runtime import logs

SIGNED = "https://u:hunter2@host/a.bin?part=1&X-Amz-Signature=hunter2&X-Amz-Credential=AK%2Fhunter2"


@pytest.mark.parametrize(("url", "shown"), [
    ("s3://bucket/prefix", "s3://bucket/prefix"),
    ("file:///data/set", "file:///data/set"),
    ("https://user:secret@host:8443/index.json?sig=hunter2#x", "https://host:8443/index.json"),
    ("https://[::1/broken", ""),
])  # fmt: skip
def test_a_url_is_shown_without_secrets(url: str, shown: str) -> None:
    assert public_url(url) == shown


@pytest.mark.parametrize(("text", "expected"), [
    (f"{SIGNED} fails", "https://host/a.bin?part=1&X-Amz-Signature=[removed]&X-Amz-Credential=[removed] fails"),
    ("proxy 'http://me:p@ss@proxy:3128' is away", "proxy 'http://proxy:3128' is away"),
    ("(https://a.blob/c?sv=1&sig=x%3D&se=2)", "(https://a.blob/c?sv=1&sig=[removed]&se=2)"),
    ("https://h/x?auth=t1&hf_token=t2;X-Goog-Signature=3", "https://h/x?auth=[removed]&hf_token=[removed];X-Goog-Signature=[removed]"),
    ("hf://datasets/o/name@main/dir, me@example.com, a=b", "hf://datasets/o/name@main/dir, me@example.com, a=b"),
    ("s3://bucket/designs=1?x=2", "s3://bucket/designs=1?x=2"),
])  # fmt: skip
def test_texts_keep_all_but_secrets(text: str, expected: str) -> None:
    assert remove_secrets(text) == expected
    assert str(CachefsError(text)) == str(OriginUnavailable(text)) == expected


@pytest.mark.parametrize("form", logs.LogFormat)
def test_the_log_has_no_secrets(form: logs.LogFormat, capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.set_up_logging("info", form)
        try:
            raise OSError(f"cannot open {SIGNED}")
        except OSError as error:
            logging.getLogger("x").exception("credentials cannot be renewed: %s", error)
    finally:
        root.handlers[:], root.level = handlers, level
    said = capfd.readouterr().err
    assert "hunter2" not in said
    assert said.count("X-Amz-Signature=[removed]") == 2
    if form is logs.LogFormat.JSON:
        # asyncio may log a task that an earlier test has left.
        [record] = [line for line in map(json.loads, said.splitlines()) if line["logger"] == "x"]
        assert record["message"].startswith("credentials cannot be renewed")


@pytest.mark.parametrize("url", [
    "s3://AKIA:hunter2@bucket/prefix", "s3://bucket/a?X-Amz-Signature=hunter2", "gs://bucket/a?X-Goog-Signature=hunter2",
    "az://container/a?sv=1&sig=hunter2", "hf://u:hunter2@datasets/owner/name", "https://u:hunter2@host/x/",
    "https://host/x/?sig=hunter2", "ftp://u:hunter2@host",
])  # fmt: skip
def test_a_url_with_secrets_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(CachefsError, match="every user of this node can see it") as caught:
        open_origin(url, OriginOptions(), OriginSettings())
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("kind", ["s3://bucket", "gs://bucket", "hf://datasets/owner/name"])
@pytest.mark.parametrize("endpoint", ["http://u:hunter2@host:9000", "http://host:9000/?token=hunter2"])
def test_an_endpoint_with_secrets_is_refused_and_not_repeated(kind: str, endpoint: str) -> None:
    with pytest.raises(CachefsError, match="without a user and a") as caught:
        open_origin(kind, OriginOptions(endpoint_url=endpoint), OriginSettings())
    assert "hunter2" not in str(caught.value)
