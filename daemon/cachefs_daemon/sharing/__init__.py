"""What the nodes of a cluster tell each other, but for blocks: each publishes its own part, and follows those of others
by long polls. Imports `cluster` and `runtime`, and is given everything else."""
