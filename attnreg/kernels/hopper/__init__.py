"""Kernels in Gluon for NVIDIA's Hopper (SM 9.0), where copies and matrix products run beside other arithmetic."""
