"""What the service does on its own: the queue, copies, clean-up."""
