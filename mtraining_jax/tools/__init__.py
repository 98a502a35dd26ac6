"""Commands and what they add to a run. The trainer imports none of it."""
