"""The subcommands of `fp8moe`: functions that take the options parsed by fp8moe.cli and return the exit status.

They may raise ValueError, OSError, RuntimeError or SafetensorError, which fp8moe.cli prints as one line.
"""
