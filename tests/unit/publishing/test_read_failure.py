"""Which failure a program is told of that dies of a failed read."""

import errno

from cachefs.messages import Trouble
from cachefs.publishing import clock, read_failure
from cachefs.trouble_texts import Cause, describe_past


def test_the_failure_is_the_last_one_of_its_kind_whichever_dataset_failed_before() -> None:
    now = clock.since_1970()
    troubles = [
        Trouble(cause=Cause.REFUSED, subject="other", since=now - 50, last=now - 40, failed=5),
        Trouble(cause=Cause.CHANGED, subject="third", since=now - 1, last=now, failed=1),
        Trouble(cause=Cause.REFUSED, subject="its own", since=now - 2, last=now - 1, failed=1),
    ]
    found = read_failure._latest_cause(troubles, errno.EACCES)
    assert found is not None
    assert found.subject == "its own"
    assert read_failure._latest_cause(troubles[:1], errno.ESTALE) is None


def test_the_read_that_a_program_dies_of_counts_though_the_daemon_knows_of_none_yet() -> None:
    now = clock.since_1970()
    ahead = Trouble(cause=Cause.REFUSED, subject="its own", since=now - 1, last=now, failed=0)
    found = read_failure._latest_cause([ahead], errno.EACCES)
    assert found is not None
    assert describe_past(found, 0.0).startswith("1 read of its own failed")
