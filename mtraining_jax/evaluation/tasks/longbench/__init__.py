"""LongBench (Bai et al., 2023) and LongBench v2 (Bai et al., 2024).

templates.json is THUDM/LongBench's LongBench/config/dataset2prompt.json (MIT licence). Rules for
scores are those of its metrics.py and eval.py, written anew.
"""
