"""The vLLM engine: the only folder that imports vllm."""
