"""`cachectl debug-bundle`: what a maintainer needs to help with a node, in one file without secrets.

`collecting` gathers texts and documents, `redaction` removes secrets from all of them, `pseudonyms` replaces names
where that is wanted, and `archive` writes the file. `bundle` puts them together.
"""
