"""What vLLM's tests import, for a process without vLLM. It runs in the suite's own virtual environment."""
