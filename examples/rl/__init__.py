"""Reinforcement learning; see `__main__`."""
