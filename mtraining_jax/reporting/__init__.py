"""What a run tells: metrics, where they are written, and what a person sees."""
