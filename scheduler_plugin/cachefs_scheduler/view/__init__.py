"""The state of the cluster, from reports of all daemons."""
