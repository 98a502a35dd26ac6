"""Published data sets. The user provides the files; the scoring rules are reimplemented.

infinitebench.json has InfiniteBench's templates for open models without a chat format
(OpenBMB/InfiniteBench, src/prompt.py, yarn_mistral_templates; MIT license). longbench.json is
LongBench/config/dataset2prompt.json and longbench_v2.json prompts/0shot.txt of THUDM/LongBench
(MIT license).
"""
