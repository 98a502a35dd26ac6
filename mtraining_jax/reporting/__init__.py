"""Metrics, metric writers and console output."""

PAGE = "report.html"  # in the folder of a run
