"""What this node tells those who place jobs, and what they may order. May import jobs, content and sharing, and what
these may."""
