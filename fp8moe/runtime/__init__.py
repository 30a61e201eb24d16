"""The base of every operation, without FP8: compiling, caching, launching, plans, backends, settings, operators."""
