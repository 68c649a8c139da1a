"""MLA's decoding on SM 9.0, in Gluon. The copy engine loads latents, or a warpgroup gathers or converts them."""
