"""What every family of kernels plans alike: the plan of a batch, and its launches."""
