"""The adapter over DeepSeek's FlashMLA, and the record of the operator that it calls."""
