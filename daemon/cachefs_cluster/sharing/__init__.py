"""The state that the nodes of a cluster share: each node publishes its own values, and follows those of the others by
long polls. Blocks are transferred by `peers`. Imports `cluster` and `runtime`, and is given everything else."""
