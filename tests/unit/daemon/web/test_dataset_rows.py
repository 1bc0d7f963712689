import pytest
from cachefs_daemon.web.dataset_rows import shown_url


@pytest.mark.parametrize(("url", "shown"), [
    ("s3://bucket/prefix", "s3://bucket/prefix"),
    ("file:///data/set", "file:///data/set"),
    ("https://user:secret@host:8443/index.json?sig=secret#x", "https://host:8443/index.json"),
    ("https://[::1/broken", ""),
])  # fmt: skip
def test_a_url_is_shown_without_secrets(url: str, shown: str) -> None:
    assert shown_url(url) == shown
