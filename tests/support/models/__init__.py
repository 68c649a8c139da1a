"""Models: configs, small ones of transformers, and what was observed of real ones."""
