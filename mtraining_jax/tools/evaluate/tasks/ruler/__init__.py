"""RULER's 13 tasks (Hsieh et al., 2024, "RULER: What's the Real Context Size of Your LM?").

Templates, sizes and rules are those of NVIDIA/RULER (scripts/synthetic.yaml,
scripts/data/synthetic, scripts/eval/synthetic), reimplemented. Prompts have the same distribution
but are not byte-identical: words, essays and random numbers differ.
"""
