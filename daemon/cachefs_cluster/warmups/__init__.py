"""Warm-ups of the whole cluster: what was requested, this node's part, and the progress of all nodes. May import
`placement` and what is below it."""
