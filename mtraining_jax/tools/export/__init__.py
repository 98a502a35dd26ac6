"""Trained models for other programs: Hugging Face and PEFT folders, and attention in PyTorch."""
