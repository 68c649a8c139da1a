"""What compilers make of the kernels, without a GPU: how they are compiled, recorded and compared."""
