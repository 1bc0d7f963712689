"""What the sequences of the cluster's jobs mean for this node: which blocks it keeps for all, which of them others will
read here and when, and where a block is that is not here. Imports `fetch` and what is below it, and `jobs`."""
