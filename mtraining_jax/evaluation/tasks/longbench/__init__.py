"""LongBench (Bai et al., 2023) and LongBench v2 (Bai et al., 2024).

templates.json is LongBench/config/dataset2prompt.json of THUDM/LongBench (MIT license). The scoring
rules reimplement its metrics.py and eval.py.
"""
