"""A packed KV cache for transformers: `register(kv_dtype=...)`, its cache, and the calls that attend to it."""
