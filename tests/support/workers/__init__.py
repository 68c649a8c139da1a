"""Functions that workers run in processes of their own, and ways to end them."""
