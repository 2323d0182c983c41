"""The bundled demo model: a tiny Llama that knows questions.yaml by heart.

Importing this package loads nothing heavy; train.py is the dev tool that made the checkpoint.
"""

from pathlib import Path

#: Folder of the checkpoint, in Hugging Face format.
CHECKPOINT: Path = Path(__file__).resolve().parent / "checkpoint"

__all__ = ["CHECKPOINT"]
