"""The state that the nodes of a cluster share: each node publishes its own values, and follows those of the others by
long polls. `peers` transfers blocks. May import `membership` and `section`."""
