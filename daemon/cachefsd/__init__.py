"""The command `cachefsd`: the one place that knows both a node's daemon and its cluster."""
