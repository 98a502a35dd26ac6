"""Settings of property tests: the same examples every time, nothing on disk."""

from hypothesis import settings

repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=50)
