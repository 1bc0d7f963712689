"""Kubernetes: extender, webhooks, gates."""
