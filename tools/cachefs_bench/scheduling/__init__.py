"""`cachefs-bench scheduling`: measures the benefit of scheduler hints in a simulated cluster. May import all
packages."""
