"""Reports of this node to observers and schedulers, and the commands that schedulers may send. May import jobs, content
and sharing, and the packages that these may import."""
