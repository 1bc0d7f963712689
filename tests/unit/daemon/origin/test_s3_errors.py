"""What refusals of S3 servers mean."""

import ssl

import pytest
from botocore.exceptions import SSLError

from cachefs.errors import OriginAccessDenied, OriginUnavailable
from cachefs_daemon.origin.s3.errors import client_error_of, judge_error
from cachefs_daemon.origin.s3.response import S3Target


def test_a_server_that_takes_signed_requests_only_is_told_so() -> None:
    body = b"<Error><Code>UnsupportedAlgorithm</Code><Message>no</Message></Error>"
    failure = judge_error(client_error_of(400, {}, body), S3Target("bucket", "", "http://server"))
    assert isinstance(failure.error, OriginAccessDenied)
    assert not failure.transient
    assert "leave out --anonymous" in str(failure.error)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ssl.SSLCertVerificationError(1, "certificate verify failed"), "AWS_CA_BUNDLE"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), "TLS fails"),
    ],
)
def test_failed_tls_says_how_a_private_authority_is_trusted_and_no_url_twice(error: OSError, told: str) -> None:
    wrapped = SSLError(endpoint_url="https://server/bucket/key?X-Amz-Signature=1", error=error)
    for given in (error, wrapped):
        failure = judge_error(given, S3Target("bucket", "key", "https://server"))
        assert isinstance(failure.error, OriginUnavailable)
        assert told in str(failure.error)
        assert "X-Amz-Signature" not in str(failure.error)
        assert len(str(failure.error)) < 260


def test_a_status_is_not_said_twice_and_has_a_way_out() -> None:
    said = str(judge_error(client_error_of(400, {}, b""), S3Target("bucket", "key", "http://server")).error)
    assert "400 400" not in said
    assert "endpoint is not an S3 server" in said
    said = str(judge_error(client_error_of(405, {}, b""), S3Target("bucket", "key", "http://server")).error)
    assert "(405: Method Not Allowed);" in said
    said = str(judge_error(client_error_of(500, {}, b""), S3Target("bucket", "key", "http://server")).error)
    assert "(500: Internal Server Error)" in said
