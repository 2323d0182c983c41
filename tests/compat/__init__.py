"""vLLM's own HTTP tests, run against `diptych serve`."""
