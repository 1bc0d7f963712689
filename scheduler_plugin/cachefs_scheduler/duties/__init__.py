"""The service's own work: queue, copies, clean-up."""
