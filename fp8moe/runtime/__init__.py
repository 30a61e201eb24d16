"""Infrastructure, independent of FP8: compiling, caching and launching kernels, backends, settings, operators."""
