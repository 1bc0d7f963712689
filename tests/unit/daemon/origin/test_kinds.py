"""The table of kinds of origins."""

import subprocess
import sys

import pytest

from cachefs.errors import ConfigError
from cachefs.messages import OriginOptions
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.origin.kinds import KINDS, OriginKind, kind_of, open_origin


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_opens_its_url(kind: OriginKind) -> None:
    url = kind.url.removesuffix("[@revision]")
    options = OriginOptions(account="account" if kind.name == "az" else None)
    assert open_origin(url, options, OriginSettings()).url == url.rstrip("/")
    assert {kind_of(f"{scheme}://x") for scheme in kind.all_schemes} == {kind}


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        kind_of("ftp://host/path")
    assert all(f"{scheme}://" in str(caught.value) for kind in KINDS for scheme in kind.all_schemes)


def test_the_table_imports_no_kind() -> None:
    """A fetch process and cachectl have it, and must start fast."""
    code = """
import sys, cachefs_daemon.origin.kinds
print([one for one in sys.modules if one.startswith(("cachefs_daemon.origin.", "aio", "numpy"))])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "['cachefs_daemon.origin.kinds']\n"
