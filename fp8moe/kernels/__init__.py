"""The kernels, one folder per family, and the activations that several families share."""
