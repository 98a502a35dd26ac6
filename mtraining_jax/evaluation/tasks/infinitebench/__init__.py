"""InfiniteBench (Zhang et al., 2024, "∞Bench: Extending Long Context Evaluation Beyond 100K").

templates.json has the templates for open models without a chat format (OpenBMB/InfiniteBench,
src/prompt.py, yarn_mistral_templates; MIT licence). Rules for scores are those of
src/compute_scores.py, written anew.
"""
