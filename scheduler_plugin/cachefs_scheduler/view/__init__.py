"""What is known of the cluster: it follows all daemons."""
