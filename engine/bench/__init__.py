"""Measures the engine on this machine, alone or in turn with vLLM: `diptych bench engine`."""
