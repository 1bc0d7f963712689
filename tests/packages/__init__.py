"""Packages as people install them: on a bare Debian, in namespaces of its own. Only by `make test-packages`."""
