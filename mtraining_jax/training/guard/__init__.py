"""Repeats steps and compares their bits, to find faults of devices while a run trains."""
