"""Keys that several programs share: which keys each program walks, the parts that they store, and their merge."""
