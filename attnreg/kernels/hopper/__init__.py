"""Kernels in Gluon for NVIDIA's Hopper (SM 9.0), whose copies and products run beside the arithmetic."""
