"""Forecasts of density, FLOP and kernel time."""
