"""A folder for each family of kernels, and what several of them share: activations."""
