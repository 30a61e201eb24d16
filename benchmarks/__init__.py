"""Benchmarks of fp8moe on a Hopper GPU, run from the repository root: `python -m benchmarks NAME`."""
