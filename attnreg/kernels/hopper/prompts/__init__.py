"""The kernel for prompts on SM 9.0."""
