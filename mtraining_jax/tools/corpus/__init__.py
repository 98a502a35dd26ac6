"""Corpora: readers of other formats, pre-tokenized files, and reports on packing."""
