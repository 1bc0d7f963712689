"""What people run beside the daemon: cachectl, the demo and the benchmarks. It may import cachefs_daemon and cachefs.

The modules of this package are the demo of a cluster and what commands of all kinds share. Nothing else imports it.
"""
