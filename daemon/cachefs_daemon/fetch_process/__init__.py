"""The fetch process: gets objects, checks them, and writes them into room that the daemon has reserved.

It makes one attempt for each and decides nothing: whatever is not as it should be, the daemon does itself. One that
dies loses nothing. Its modules `frames` and `channel` are for the daemon too. May import origin and store.
"""
