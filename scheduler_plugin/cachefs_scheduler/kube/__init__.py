"""Kubernetes integration: answers kube-scheduler and the API server, follows pods, and opens their gates.

May import modules of cachefs_scheduler below it, but not the sibling packages. `pod_job`, `gangs`, `extender`,
`admission_webhook` and `pod_jobs` make decisions without I/O; `server`, `pod_controller`, `api`, `leader` and
`integration` do the I/O.
"""
