"""`cachefs-bench scheduling`: what scheduler hints are worth, in a simulated cluster. May import all wings."""
