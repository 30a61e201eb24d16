"""What the subcommands of `fp8moe` do, a file each: run(options) -> exit status, with the options of fp8moe.cli.

fp8moe.cli makes one line of an error: ValueError, OSError, RuntimeError or SafetensorError.
"""
