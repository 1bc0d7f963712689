"""How a training process tells the daemon what it is going to read.

`channel` is the training process's side: it starts a helper process, hands it messages, and never waits. `helper` is
that process: it finds out where paths lie (`places`), turns orders of samples into orders of files (`consumer`), and
talks to the daemon. gRPC, which does not survive a fork, is thus never loaded where a DataLoader forks.

What the training process imports of cachefs needs the standard library and numpy only, so that `cachefs run` works for
interpreters that cachefs is not installed in.
"""
