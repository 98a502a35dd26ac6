"""Scripts that measure, one question each, and the tables they printed."""
