"""One Python module per kernel family, and what they share: compiling, launching, choosing the backend."""
