"""Bridges from fp8moe to the outside: models, checkpoints and decoding loops."""
