"""The parts of Triton that no release promises to keep, and how releases differ in them."""
