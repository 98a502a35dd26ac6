"""Arithmetic of selections: scores, rules, documents. Knows no pattern."""
