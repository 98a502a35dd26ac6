"""What goes beside training: commands, and what they add to a run. The core imports none of it."""
