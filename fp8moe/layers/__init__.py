"""Modules whose weights are FP8 tensors in the layout of DeepSeek-style checkpoints."""
