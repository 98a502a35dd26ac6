"""Mixtures of experts: the router, and products of rows sorted by expert."""
