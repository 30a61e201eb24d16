"""The subcommands of `fp8moe`: functions of the options of fp8moe.cli that return the exit status.

fp8moe.cli makes one line of an error: ValueError, OSError, RuntimeError or SafetensorError.
"""
