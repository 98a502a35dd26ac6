"""Dry run: predicts memory, FLOP and step time without the devices of the run."""
