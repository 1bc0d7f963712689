"""Measures the answers to kube-scheduler: `cachefs-bench extender`. May import cachefs_scheduler, as other rooms of the
tools may not."""
