"""attnreg's kernels inside SGLang: a plug-in, and the attention backend that it registers."""
