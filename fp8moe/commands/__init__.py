"""The subcommands of `fp8moe`, one file each: HELP, DESCRIPTION, add_arguments(parser), run(options) -> exit status.

fp8moe.cli makes one line of an error: ValueError, OSError, RuntimeError or SafetensorError.
"""
