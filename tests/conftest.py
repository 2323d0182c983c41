"""Before anything else: exact bf16 needs oneDNN pinned before the process's first product."""

from diptych.engine.cpu import pin_cpu_math

pin_cpu_math(1)
