"""vLLM as a second engine of a worker: its models and kernels, behind our transfers and router."""
