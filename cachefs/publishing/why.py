"""Says why a read has failed: `python -I -S why.py ERRNO JOB OUTPUT` (see cachefs.publishing.last_words).

It is a script, and not imported by anything: a training process that dies runs it with the interpreter of
`cachefs run`, as launch.py runs the helper. It writes two lines to the
descriptor OUTPUT, the key of the trouble and its text, or nothing where the daemon knows nothing.
"""

import importlib.util
import os
import select
import site
import sys
import time

# Seconds that the daemon has to answer, and for which a failure counts as that of the program.
TIMEOUT = 2.0
RECENT = 120.0


def why(number: int, job: str) -> str:
    """Returns the key of a trouble (see `TroubleRecord`) and its line, or "". number: the errno of the read; job: the
    program's."""
    from cachefs.errors import CachefsError
    from cachefs.job_messages import JobName
    from cachefs.messages import Empty
    from cachefs.publishing.route import Route
    from cachefs.rpc import JOB_SHOW, STATUS, DaemonClient
    from cachefs.socket_path import refusal, socket_path
    from cachefs.troubles import SEE_ERRORS, Cause, cause_of, is_failing, past_words, words

    client = DaemonClient(socket_path())
    try:
        if refusal(client.socket):
            troubles = Route(client).call(JOB_SHOW, JobName(job=job), TIMEOUT).troubles
        else:
            troubles = client.call(STATUS, Empty(), TIMEOUT).troubles
    except CachefsError:
        return ""
    now = time.time()
    failing = [one for one in troubles if is_failing(one.cause) and now - one.last < RECENT]
    found = next((one for one in failing if one.cause == cause_of(number)), None)
    if found is None and cause_of(number) == Cause.FAILED:
        found = next((one for one in troubles if one.cause == Cause.ORIGIN), None)
    if found is None:
        return ""
    key = f"{found.cause} {found.subject}"
    if is_failing(found.cause):
        return f"{key}\n{past_words(found.cause, found.subject, 0.0, found.failed, found.reason)}"
    return f"{key}\n{words(found, now)}; {SEE_ERRORS}"


if __name__ == "__main__":
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        "cachefs", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["cachefs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    site.main()
    if sys.prefix == sys.base_prefix and os.path.isdir(site.getusersitepackages()):
        site.addsitedir(site.getusersitepackages())  # last: of a `pip install --user`
    line = why(int(sys.argv[1]), sys.argv[2])
    if line:
        os.write(int(sys.argv[3]), line.encode(errors="replace")[: select.PIPE_BUF])
