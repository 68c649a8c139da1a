"""The packed KV cache of TurboQuant: its bytes, its codebooks, and its quantisation in float64."""
