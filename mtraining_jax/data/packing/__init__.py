"""Packs documents into sequences."""
