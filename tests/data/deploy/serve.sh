#!/usr/bin/env bash
set -euo pipefail
MODEL=Llama-3.1-8B
BACKEND=XFORMERS
ARGS=(
  --tensor-parallel-size 2   # two ranks
  --attention-backend "$BACKEND"
)
if [ -n "${FP8:-}" ]; then
  ARGS+=(--kv-cache-dtype fp9)
fi
cat > other.yaml <<EOF
vllm serve $MODEL --attention-backend NOTHING
EOF
exec vllm serve "$MODEL" "${ARGS[@]}" 2>&1 | tee -a log
