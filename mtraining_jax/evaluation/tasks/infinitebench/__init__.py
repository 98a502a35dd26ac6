"""InfiniteBench (Zhang et al., 2024, "∞Bench: Extending Long Context Evaluation Beyond 100K").

templates.json has the templates for open models without a chat format (OpenBMB/InfiniteBench,
src/prompt.py, yarn_mistral_templates; MIT license). The scoring rules reimplement
src/compute_scores.py.
"""
