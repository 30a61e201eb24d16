"""The subcommands of `fp8moe`, one file each: HELP, add_arguments(parser), run(options) -> exit status."""
