"""MLA over the latents that transformers caches: decoding in the latent form, prompts in the expanded form."""
