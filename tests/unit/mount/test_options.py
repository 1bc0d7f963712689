"""Options of mount.cachefs as users, mount(8) and fstab write them."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from cachefs.errors import ConfigError
from cachefs.mount.cli import main
from cachefs.mount.options import option_helps, parse_options


def test_the_help_of_the_command_has_every_option() -> None:
    words = CliRunner().invoke(main, ["--help"]).output.split()
    for one in option_helps():
        assert {spelling.rstrip(",") for spelling in one.spellings} <= {word.rstrip(",") for word in words}


def test_defaults_are_those_of_who_mounts() -> None:
    options = parse_options(())
    assert (options.uid, options.gid) == (os.getuid(), os.getgid())
    assert options.allow_other == (os.geteuid() == 0)
    assert options.zero_open


def test_what_fstab_adds_is_accepted() -> None:
    assert parse_options(("rw,relatime,_netdev,nofail,x-systemd.automount,defaults",)) == parse_options(())


def test_values_are_converted() -> None:
    options = parse_options(("uid=12,gid=34,umask=027", "readahead=0,daemon_wait=1.5,log=m.log"))
    assert (options.uid, options.gid, options.umask) == (12, 34, 0o027)
    assert (options.readahead, options.daemon_wait) == (0, 1.5)
    assert options.log == Path.cwd() / "m.log"
    assert parse_options(("page_cache_budget=256MiB",)).page_cache_budget == "256MiB"


def test_the_later_option_wins() -> None:
    assert not parse_options(("allow_other", "noallow_other")).allow_other
    assert parse_options(("no_zero_open,zero_open",)).zero_open
    assert parse_options(("push",)).push
    assert not parse_options(("push,no_push",)).push
    assert [flag for flag in parse_options(("nodev,dev",)).kernel if flag.endswith("dev")] == ["dev"]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("colour=red", "colour=red"),
        ("uid=root", "user number"),
        ("uid=-1", "user number"),
        ("uid=4294967295", "user number"),
        ("gid=99999999999999999999", "group number"),
        ("uid", "user number"),
        ("umask=999", "octal"),
        ("daemon_wait=soon", "seconds"),
        ("daemon_wait=nan", "seconds"),
        ("page_cache_budget=much", "a share such as 25%"),
        ("page_cache_budget=101%", "a share such as 25%"),
        ("shield=yes", "auto, on or off"),
        ("shield", "auto, on or off"),
        ("zero_open=yes", "zero_open=yes"),
        ("sheild=off", "did you mean 'shield'?"),
    ],
)
def test_a_bad_option_is_named_with_what_it_takes(option: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options((option,))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
