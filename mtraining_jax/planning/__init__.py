"""What a run would need: memory, FLOP and time of a step, without its devices."""
