"""`cachectl doctor`: examines the machine, the node and its origins, and reports problems with their remedies.

Each module has one subject: a record of facts, a function `gather` that collects them, and a function that derives
findings from facts without I/O. Facts are gathered by child processes with deadlines (`fact_child`), so that a hanging
mount or disk blocks nothing. May import everything of the daemon and of `cachefs`.
"""
