"""Other packages: the installed ones, the digests of kernels' code, and the versions in the evidence of backends."""
