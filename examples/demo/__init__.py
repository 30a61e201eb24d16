"""The demo; see `__main__`."""
