"""`python -m cachefs.mount SPEC DIR`: the same as `mount.cachefs`."""

from cachefs.mount.cli import main

main(prog_name="mount.cachefs")
