"""`cachectl debug-bundle`: collects what a maintainer needs to help with a node in one file, without secrets.

`parts` gathers texts and documents, `redaction` removes secrets from all of them, `pseudonyms` replaces names if
requested, and `archive` writes the file. `bundle` combines them.
"""
