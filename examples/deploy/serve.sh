#!/usr/bin/env bash
set -euo pipefail
export VLLM_ATTENTION_BACKEND=FLASHINFER
MODEL=gpt-oss-120b
ARGS=(
  --tensor-parallel-size 2
  --kv-cache-dtype fp8
)
if [ -n "${FLEX:-}" ]; then
  ARGS+=(--attention-backend FLEX_ATENTION)
fi
exec vllm serve "$MODEL" "${ARGS[@]}"
