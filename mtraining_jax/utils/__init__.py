"""Helpers without a domain of their own: errors, files, text, signals, plug-ins."""
