"""The nodes of a cluster, acting as one cache: implements the ports of `cachefs_daemon` (`cachefs_daemon.ports`)."""
