"""`cachectl doctor`: looks at the machine, the node and its origins, and says what is wrong and what helps.

Each module has one subject: a record of facts, a function `gather` that finds them out, and a function that makes
findings of facts without any I/O. Facts are gathered by child processes with deadlines (`asking`), so that a mount or a
disk that hangs holds up nobody. It may import everything of the daemon and of `cachefs`.
"""
