"""What refusals of S3 servers mean."""

from cachefs_daemon.origin.s3_answer import Place
from cachefs_daemon.origin.s3_errors import judge, refusal

from cachefs.errors import OriginAccessDenied


def test_a_server_that_takes_signed_requests_only_is_told_so() -> None:
    body = b"<Error><Code>UnsupportedAlgorithm</Code><Message>no</Message></Error>"
    failure = judge(refusal(400, {}, body), Place("bucket", "", "http://server"))
    assert isinstance(failure.error, OriginAccessDenied)
    assert not failure.transient
    assert "leave out --anonymous" in str(failure.error)
