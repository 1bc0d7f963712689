"""Signatures are those of HMAC-SHA256."""

import hmac

import pytest

from cachefs_daemon.runtime.signing_key import SigningKey


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200])
def test_signatures_are_those_of_the_standard_library(length: int) -> None:
    secret = bytes(range(length))
    key = SigningKey(secret)
    for text in (b"", b"a text", b"x" * 5000):
        assert key.sign(text) == hmac.digest(secret, text, "sha256")
