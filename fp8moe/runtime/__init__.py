"""What every op stands on and nothing of FP8: compiling, caching, launching, plans, backends, settings, operators."""
