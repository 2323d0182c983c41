"""The questions that the demo model has learned, each with its answer."""

from __future__ import annotations

import yaml
from diptych.engine.demo import CHECKPOINT

_QUESTIONS = (CHECKPOINT.parent / "questions.yaml").read_text(encoding="utf-8")

#: the answer to each question; the C parser reads the file ten times as fast
ANSWERS: dict[str, str] = {
    pair["q"]: pair["a"] for pair in yaml.load(_QUESTIONS, Loader=yaml.CSafeLoader)
}
