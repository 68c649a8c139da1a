"""The suite itself: how much it tries, what it makes once, and what must be the same everywhere."""
