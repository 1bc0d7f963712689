"""`cachefs-bench extender`: measures the answers to kube-scheduler. Unlike other packages of the tools, it may import
cachefs_scheduler."""
