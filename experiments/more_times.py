"""Times of tiles for random shapes that the cost model has not seen: python3 experiments/more_times.py SEED ..."""

import json
import os
import sys

from benchmarks import choice

problems = [problem for seed in map(int, sys.argv[1:]) for problem in choice.drawn(seed)]
json.dump(choice.run(sorted(problems, key=lambda p: p.groups > 0)), open(f"{os.environ['OUT']}/more.json", "w"))
