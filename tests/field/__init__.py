"""What people do with cachefs: one file per kind of situation, each with one daemon. docs/contributing.md says how to
add one."""
