"""Compiled prefill and decode programs."""
