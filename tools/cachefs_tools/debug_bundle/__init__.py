"""`cachectl debug-bundle`: collects what a maintainer needs to help with a node in one file, without secrets.

`parts` gathers texts and documents, `redaction` removes secrets from all of them and replaces names if requested, and
`bundle` combines them and writes the file.
"""
