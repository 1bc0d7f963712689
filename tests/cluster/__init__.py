"""Several daemons on one machine."""
