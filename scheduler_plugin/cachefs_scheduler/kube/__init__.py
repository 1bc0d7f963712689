"""Kubernetes: answers kube-scheduler and the API server, follows pods, and opens their gates.

May import what lies below it in cachefs_scheduler, and of the other rooms none. `pod_job`, `gangs`, `extender`,
`admission` and `reconcile` decide and do no I/O; `server`, `pod_watch`, `api`, `leader` and `part` do what they say.
"""
