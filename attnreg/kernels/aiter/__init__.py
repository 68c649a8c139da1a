"""What the rows of AITER share: adapters to AMD's kernels, and the record of what they call."""
