"""Start and agreement of several processes."""
