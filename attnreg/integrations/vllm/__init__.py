"""The adapter for vLLM: its selector's inputs as requests, and a plugin that lets a registry decide inside vLLM."""

from attnreg.engines.vllm_requests import request_from_selector_row

__all__ = ["request_from_selector_row"]
