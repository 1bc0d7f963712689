"""What each documented error code of each store means: whether it is tried again, and what the reader is told to do."""

from typing import NamedTuple

import pytest

from cachefs.errors import CachefsError, ConfigError, NotFound, ObjectChanged, OriginAccessDenied, OriginUnavailable
from cachefs.messages import Trouble
from cachefs.trouble_texts import cause_of_errno, describe_trouble, remedy
from cachefs_daemon.origin.refusals import ErrorMeaning, ErrorTable, Refusal, parse_error_body
from cachefs_daemon.origin.s3.errors import S3, client_error_of, judge_error
from cachefs_daemon.origin.s3.response import S3Target
from cachefs_daemon.origin.web.az import AZURE
from cachefs_daemon.origin.web.gs import GOOGLE
from cachefs_daemon.origin.web.hf import HUB

TABLES = {"s3": S3, "gs": GOOGLE, "az": AZURE, "hf": HUB}
WORDS = {
    "where": "THING", "url": "THING", "bucket": "THING", "container": "THING", "endpoint": "SERVER", "kind": "KIND",
    "payer": "", "anonymous": "", "page": "PAGE", "token": "TOKEN", "revision": "main",
}  # fmt: skip


class Outcome(NamedTuple):
    """What a reader gets for some codes."""

    error: type[CachefsError]
    # Stands in the text.
    says: str
    transient: bool = False
    throttled: bool = False


REFUSALS = [
    row
    for table in TABLES.values()
    for row in dict.fromkeys([*table.codes.values(), *table.listing.values()])
    if row.error is OriginAccessDenied
]
REFRESH = Outcome(ObjectChanged, "; refresh the dataset")
ARCHIVED = Outcome(OriginAccessDenied, "is archived, so it cannot be read")
KEY = Outcome(OriginAccessDenied, "key")
RIGHTS = Outcome(OriginAccessDenied, "THING is refused")
EXPIRED = Outcome(OriginAccessDenied, "renew them for the daemon", True)
CLOCK = Outcome(OriginAccessDenied, "set this node's clock", True)
CLOSED = Outcome(OriginAccessDenied, "ask the owner of the account")
SIGNED = Outcome(OriginAccessDenied, "leave out --anonymous")
NO_BUCKET = Outcome(NotFound, "there is no ")
NAME = Outcome(ConfigError, "check the URL")
BUSY = Outcome(OriginUnavailable, "overloaded or down", True)
THROTTLED = Outcome(OriginUnavailable, "overloaded or down", True, True)

# Codes and statuses as the stores' pages of error codes have them.
EXPECTED: dict[str, dict[Outcome, str]] = {
    "s3": {
        REFRESH: "NoSuchKey NoSuchVersion PreconditionFailed InvalidRange",
        ARCHIVED: "InvalidObjectState ObjectNotInActiveTierError",
        KEY: "KMS.DisabledException KMS.InvalidKeyUsageException KMS.InvalidStateException KMS.KMSInvalidStateException"
        " KMS.NotFoundException KMS.AccessDeniedException ServerSideEncryptionConfigurationNotFoundError",
        Outcome(OriginAccessDenied, "SSE-C"): "InvalidRequest",
        NO_BUCKET: "NoSuchBucket NoSuchAccessPoint NoSuchAccessPointPolicy InvalidAccessPointAliasError"
        " InvalidAccessPoint",
        NAME: "InvalidBucketName InvalidURI KeyTooLongError XMinioInvalidObjectName",
        Outcome(ConfigError, "--region"): "PermanentRedirect TemporaryRedirect Redirect AuthorizationHeaderMalformed"
        " IllegalLocationConstraintException IncorrectEndpoint 301 307",
        RIGHTS: "AccessDenied AccessDeniedException UnauthorizedAccess InvalidPayer InvalidSecurity 401 403"
        " InvalidAccessKeyId SignatureDoesNotMatch InvalidToken",
        CLOSED: "AccountProblem AllAccessDisabled NotSignedUp UserSuspended",
        Outcome(OriginAccessDenied, "--user-project"): "UserProjectMissing",
        EXPIRED: "ExpiredToken ExpiredTokenException TokenRefreshRequired",
        CLOCK: "RequestTimeTooSkewed RequestExpired",
        SIGNED: "AccessTokenRequired MissingAuthenticationToken MissingSecurityHeader UnsupportedAlgorithm",
        Outcome(ConfigError, "signatures of version 4"): "UnsupportedSignature",
        THROTTLED: "SlowDown SlowDownRead Throttling ThrottlingException KMS.ThrottlingException RequestLimitExceeded"
        " BandwidthLimitExceeded TooManyRequests TooManyRequestsException",
        BUSY: "RequestTimeout InternalError ServiceUnavailable OperationAborted Busy XMinioServerNotInitialized"
        " XMinioReadQuorum",
        Outcome(OriginUnavailable, "does not know such requests"): "NotImplemented MethodNotAllowed 501",
        Outcome(OriginUnavailable, "the endpoint is not an S3 server"): "400",
    },
    "gs": {
        REFRESH: "notFound NoSuchKey gone conditionNotMet PreconditionFailed requestedRangeNotSatisfiable InvalidRange",
        NO_BUCKET: "NoSuchBucket",
        Outcome(OriginAccessDenied, "--user-project PROJECT"): "userProjectMissing UserProjectMissing 400",
        Outcome(OriginAccessDenied, "serviceusage.services.use"): "userProjectInconsistent userProjectInvalid"
        " userProjectAccessDenied userProjectAccountProblem UserProjectInconsistent UserProjectInvalid"
        " UserProjectAccessDenied UserProjectAccountProblem",
        RIGHTS: "AuthenticationRequiredRequesterPays authError forbidden insufficientPermissions AccessDenied"
        " orgPolicyConstraintFailed 401 403",
        CLOSED: "accountDisabled BillingDisabled lockedDomainExpired usageLimits.accessNotConfigured"
        " accessNotConfigured",
        Outcome(OriginAccessDenied, "country"): "countryBlocked",
        Outcome(OriginAccessDenied, "https://"): "sslRequired",
        KEY: "cloudKmsBadKey cloudKmsDecryptionKeyNotFound cloudKmsDisabledKey cloudKmsKeyLocationNotAllowed"
        " resourceIsEncryptedWithCustomerEncryptionKey ResourceIsEncryptedWithCustomerEncryptionKey"
        " customerEncryptionKeyIsIncorrect",
        THROTTLED: "rateLimitExceeded userRateLimitExceeded usageLimits.rateLimitExceeded quotaExceeded SlowDown",
        BUSY: "backendError internalError gatewayTimeout InternalError ServiceUnavailable",
    },
    "az": {
        REFRESH: "BlobNotFound ResourceNotFound ConditionNotMet TargetConditionNotMet BlobOverwritten InvalidRange",
        ARCHIVED: "BlobArchived BlobBeingRehydrated",
        NO_BUCKET: "ContainerNotFound ContainerBeingDeleted",
        NAME: "InvalidResourceName InvalidUri OutOfRangeInput",
        RIGHTS: "AuthenticationFailed InvalidAuthenticationInfo NoAuthenticationInformation 401 403",
        Outcome(OriginAccessDenied, "firewall"): "AuthorizationFailure AuthorizationSourceIPMismatch",
        Outcome(ConfigError, "https://"): "AuthorizationProtocolMismatch AccountRequiresHttps",
        Outcome(OriginAccessDenied, "Storage Blob Data Reader"): "AuthorizationPermissionMismatch"
        " AuthorizationServiceMismatch AuthorizationResourceTypeMismatch InsufficientAccountPermissions"
        " KeyBasedAuthenticationNotPermitted",
        Outcome(OriginAccessDenied, "without --anonymous"): "PublicAccessNotPermitted",
        CLOSED: "AccountIsDisabled ContainerDisabled",
        KEY: "BlobUsesCustomerSpecifiedEncryption KeyVaultEncryptionKeyNotFound KeyVaultAccessTokenCannotBeAcquired"
        " KeyVaultVaultNotFound",
        THROTTLED: "ServerBusy",
        BUSY: "OperationTimedOut InternalError AccountBeingCreated",
    },
    "hf": {
        REFRESH: "EntryNotFound",
        Outcome(OriginAccessDenied, "accept its conditions at PAGE"): "GatedRepo",
        Outcome(OriginAccessDenied, "or TOKEN"): "RepoNotFound 401 403",
        Outcome(OriginAccessDenied, "is disabled"): "DisabledRepo",
        Outcome(NotFound, "%2F"): "RevisionNotFound",
        THROTTLED: "TooManyRequests",
    },
}
ROWS = [
    (store, code, outcome)
    for store, rows in EXPECTED.items()
    for outcome, codes in rows.items()
    for code in codes.split()
]
# Where a listing was asked for.
LISTED: list[tuple[str, str, Outcome]] = [
    ("s3", "NoSuchKey", NO_BUCKET),
    ("s3", "404", NO_BUCKET),
    ("s3", "NoSuchBucket", NO_BUCKET),
    ("gs", "notFound", NO_BUCKET),
    ("gs", "gone", NO_BUCKET),
    ("gs", "404", NO_BUCKET),
    ("az", "ResourceNotFound", NO_BUCKET),
    ("az", "404", Outcome(NotFound, "there is nothing at THING")),
    ("hf", "EntryNotFound", Outcome(NotFound, "there is no such directory")),
    ("hf", "404", Outcome(NotFound, "there is nothing at THING")),
]
# Where the server gives no code that is known, or none at all.
STATUSES = {
    404: REFRESH, 410: REFRESH, 412: REFRESH, 416: REFRESH, 408: BUSY, 429: THROTTLED, 500: BUSY, 502: BUSY, 503: BUSY,
    504: BUSY, 418: Outcome(OriginUnavailable, "see its log"),
}  # fmt: skip


def check(table: ErrorTable, said: Refusal, outcome: Outcome, *, is_listing: bool = False) -> None:
    failure = table.judge(said, WORDS, is_listing=is_listing)
    text = str(failure.error)
    assert type(failure.error) is outcome.error, text
    assert outcome.says in text
    assert f"({said})" in text
    assert (failure.transient, failure.throttled) == (outcome.transient, outcome.throttled)
    # A way out, and the advice to list anew only where that helps.
    assert "; " in text or failure.transient
    assert ("refresh the dataset" in text) == (outcome.error is ObjectChanged)


@pytest.mark.parametrize(("store", "code", "outcome"), ROWS, ids=[f"{store} {code}" for store, code, _ in ROWS])
def test_each_code_says_what_to_do(store: str, code: str, outcome: Outcome) -> None:
    said = Refusal(int(code)) if code.isdigit() else Refusal(400, code, "the server's own words")
    check(TABLES[store], said, outcome)


@pytest.mark.parametrize(("store", "code", "outcome"), LISTED, ids=[f"{store} {code}" for store, code, _ in LISTED])
def test_a_listing_is_told_of_bucket_or_directory(store: str, code: str, outcome: Outcome) -> None:
    said = Refusal(int(code)) if code.isdigit() else Refusal(404, code)
    check(TABLES[store], said, outcome, is_listing=True)


@pytest.mark.parametrize("store", TABLES)
def test_no_row_is_without_a_test(store: str) -> None:
    assert {code for name, code, _ in ROWS if name == store} == {str(code) for code in TABLES[store].codes}
    tested = {code for name, code, _ in LISTED if name == store}
    assert {str(code) for code in TABLES[store].listing} <= tested


@pytest.mark.parametrize("store", TABLES)
@pytest.mark.parametrize("status", STATUSES)
def test_a_code_that_is_not_known_is_judged_by_its_status(store: str, status: int) -> None:
    check(TABLES[store], Refusal(status, "SomethingNew", "as of next year"), STATUSES[status])


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (
            b"<?xml version='1.0'?><Error><Code>InvalidObjectState</Code><Message>The operation is not valid</Message>"
            b"<StorageClass>GLACIER</StorageClass></Error>",
            "InvalidObjectState", "The operation is not valid",
        ),
        (b'<E xmlns="urn:x"><Code>BlobArchived</Code><Message>This</Message></E>', "BlobArchived", "This"),
        (
            b'{"error": {"code": 400, "message": "Bucket is a requester pays bucket but no user project provided.",'
            b' "errors": [{"message": "Bucket", "domain": "global", "reason": "required"}]}}',
            "required", "Bucket is a requester pays bucket but no user project provided.",
        ),
        (b'{"error": "Access to dataset o/n is restricted."}', "", "Access to dataset o/n is restricted."),
        (b'{"error": 7}', "", ""),
        (b"<html><body>Bad gateway", "", ""),
        (b"\xff\xfe", "", ""),
        (b"", "", ""),
    ],
)  # fmt: skip
def test_the_words_of_each_kind_of_store_are_found(body: bytes, code: str, message: str) -> None:
    assert parse_error_body(body) == (code, message)


def test_the_words_of_a_server_are_one_bounded_line_and_no_control_characters() -> None:
    said = str(Refusal.from_response(403, "A" * 500, "\x1b[31mred\nRequestId:b5\n" + "x" * 9000, None))
    assert said == f"403 {'A' * 79}…: [31mred"
    assert len(str(Refusal.from_response(403, "A", "x" * 9000, None))) < 320
    assert str(Refusal.from_response(403, "403", "403", None)) == "403"


def test_a_refusal_without_words_of_the_bucket_names_requester_pays_until_it_is_set() -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>no identity-based policy allows it</Message></Error>"
    failure = judge_error(client_error_of(403, {}, body), S3Target("b", "k", "AWS"))
    assert "no identity-based policy allows it" in str(failure.error)
    assert "--requester-pays" in str(failure.error)
    failure = judge_error(client_error_of(403, {}, body), S3Target("b", "k", "AWS", requester_pays=True))
    assert "--requester-pays" not in str(failure.error)


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.cause)
def test_a_trouble_names_the_way_out_of_its_refusal_and_no_other(row: ErrorMeaning) -> None:
    error = row.make_failure(WORDS).error
    trouble = Trouble(cause_of_errno(error.errno), "pets", 0.0, 1.0, str(error), failed=3)
    assert row.remedy
    assert row.remedy.format_map(WORDS) in describe_trouble(trouble, 2.0)
    assert remedy(trouble) == "fix the cause that the reason names, then check with `cachectl doctor pets`"
