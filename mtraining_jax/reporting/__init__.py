"""What a run reports: metrics, where they are written, and what it prints."""
