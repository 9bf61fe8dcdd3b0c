"""Runs: one experiment with its options is one folder, which survives a kill and is never made twice."""
