"""The nodes of a cluster, acting as one cache: implements the ports of `cachefs_daemon` (`cachefs_daemon.ports`)."""

import cachefs_daemon  # noqa: F401  # before numpy: see there
