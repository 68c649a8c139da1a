"""MLA from the latents that transformers caches: decoded in the latent space, prompts expanded by their own backend."""
