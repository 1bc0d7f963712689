"""The log line on a dataset that is not added has no URL, in which a secret may be."""

import pytest

from cachefs_daemon.api.service import _without_url


def test_nothing_of_the_url_is_left_and_the_text_can_be_read() -> None:
    text = "no usable credentials for s3://pub/ at http://127.0.0.1:19001: no"
    left = "no usable credentials for the URL at http://127.0.0.1:19001: no"
    assert _without_url(text, "s3://pub") == _without_url(text, "s3://pub/") == left


@pytest.mark.parametrize(
    "url", ["s3://me:secret@pub", "https://h/dir?sig=secret", "s3://me:secret", "s3://me%40secret"]
)
@pytest.mark.parametrize("end", ["", "/"])
def test_a_secret_is_left_out(url: str, end: str) -> None:
    assert _without_url(f"URL {url + end!r} names no bucket", url + end) == "the URL names no bucket"
    assert _without_url(f"no answer for {url}/ at http://x", url + end) == "no answer for the URL at http://x"
