"""Starting the helper where a system call that this takes is missing, or refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from cachefs.publishing import channel

REFUSED = r"""
import ctypes, errno, os, struct, sys
from cachefs.publishing import channel
libc = ctypes.CDLL(None, use_errno=True)
# Load the number of the system call; where it is close_range, return the error; else go on.
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 436), (6, 0, 0, 0x00050000 | getattr(errno, sys.argv[1])), (6, 0, 0, 0x7FFF0000)]
text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in steps))
filters = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(text))
assert libc.prctl(38, 1, 0, 0, 0) == 0, ctypes.get_errno()
assert libc.prctl(22, 2, ctypes.c_char_p(filters), 0, 0) == 0, ctypes.get_errno()
"""

DESCRIPTORS = r"""
opened = [os.dup(0) for _ in range(400)]
for one in opened:
    os.set_inheritable(one, True)
given = opened[200]
program = (
    "import os, sys; listed = os.listdir('/proc/self/fd');"
    "found = [int(one) for one in listed if os.path.exists(f'/proc/self/fd/{one}')];"
    "os.write(int(sys.argv[1]), repr(found).encode())"
)
said = eval(channel.run_detached([sys.executable, "-I", "-S", "-c", program], os.environ, (given,), 60))
assert given in said, said
assert not set(said) & set(opened) - {given}, said
print("done")
"""

HELPER = r"""
made = channel.HelperChannel(f"refused-{os.getpid()}")
assert made.page.wanted_samples(0) is not None
made.close()
print("done")
"""


def output_of(program: str, error: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED + program, error], capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS", "EINVAL"])
def test_where_close_range_is_refused_the_program_has_no_descriptor_of_the_job(error: str) -> None:
    assert output_of(DESCRIPTORS, error) == ("done\n", "")


def test_where_close_range_is_refused_there_is_a_helper() -> None:
    assert output_of(HELPER, "EPERM") == ("done\n", "")


def test_where_a_program_that_is_no_child_cannot_be_started_the_helper_starts_as_a_child(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from cachefs import _process

    def refused(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(_process, "start", refused)
    made = channel.HelperChannel(f"refused-{tmp_path.name}")
    try:
        assert (made.directory / channel.PAGE_NAME).is_symlink()
    finally:
        made.close()
