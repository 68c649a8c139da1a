"""The adapter over vLLM's CUTLASS kernel for MLA, and the record of the operators that it calls."""
