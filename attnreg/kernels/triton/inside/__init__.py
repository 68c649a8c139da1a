"""What is taken from Triton's inside, which no release promises, and where releases differ in it."""
