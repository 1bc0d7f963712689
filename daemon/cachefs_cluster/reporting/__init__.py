"""Reports to observers and schedulers: what this node holds and reads; and the commands that they may send."""
