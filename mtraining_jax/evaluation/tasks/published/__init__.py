"""Published data sets. The user provides the files; the scoring rules are reimplemented.

InfiniteBench (Zhang et al., 2024, "∞Bench: Extending Long Context Evaluation Beyond 100K").
infinitebench.json has the templates for open models without a chat format
(OpenBMB/InfiniteBench, src/prompt.py, yarn_mistral_templates; MIT license).

LongBench (Bai et al., 2023) and LongBench v2 (Bai et al., 2024). longbench.json is
LongBench/config/dataset2prompt.json and longbench_v2.json prompts/0shot.txt of THUDM/LongBench
(MIT license).
"""
