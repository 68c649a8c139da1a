CMD="vllm serve Llama-3.1-8B"
CMD="$CMD --dtype halve"
CMD+=" --speculative-config.modle x"
$CMD
