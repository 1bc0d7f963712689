"""Programs beside the daemon: cachectl, the demo and the benchmarks. May import cachefs_daemon and cachefs.

The modules of this package are the cluster demo, and code shared by commands of all kinds. Nothing else imports it.
"""
