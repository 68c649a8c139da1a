"""Multi-head latent attention: the contract of its layers, and the layer."""
