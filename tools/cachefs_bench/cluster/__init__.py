"""`cachefs-bench cluster`: several nodes on this machine, jobs that read through all of them, and faults."""
