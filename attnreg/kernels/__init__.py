"""One thin module per registry row, imported by its name once its backend is chosen, and what they share."""
