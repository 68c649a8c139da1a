"""The text of files: their values with places, and what of it a message may quote."""
