"""The parts of a plan that all families of kernels share: the plan of a batch, and its launches."""
