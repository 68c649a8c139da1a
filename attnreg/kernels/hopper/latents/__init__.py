"""MLA's decoding on SM 9.0, in Gluon: latents by the copy engine, or gathered and converted by a warpgroup."""
