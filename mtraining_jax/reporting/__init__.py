"""Metrics, metric writers and console output."""
