"""Soak test of interrupted training runs."""
