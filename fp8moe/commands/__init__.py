"""The subcommands of `fp8moe`, one file each: HELP, add_arguments(parser) and run(options), which returns exit status."""
