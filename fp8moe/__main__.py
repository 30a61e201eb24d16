"""Run the command `fp8moe` as `python -m fp8moe`."""

import sys

from fp8moe.cli import main

if __name__ == "__main__":
    sys.exit(main())
