"""Text in, ids out, and back: chat template, tokenizer, incremental detokenizing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ...engine.errors import WeightsError
from ...engine.spec import read_json
from .errors import ApiError


class Text:
    """The text side of one checkpoint. Templates run in a sandbox; ids travel, text does not."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise WeightsError(f"tokenizer.json is missing in {folder}: export a fast tokenizer")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise WeightsError(f"{path} is not a tokenizer: {error}") from None
        settings = folder / "tokenizer_config.json"
        self._settings = read_json(settings) if settings.exists() else {}
        self._template = self._compile(self._find_template(folder))

    @property
    def token_chars(self) -> int:
        """Characters of the longest token, special ones included."""
        return max(len(token) for token in self.tokenizer.get_vocab(with_added_tokens=True))

    def _find_template(self, folder: Path) -> str | None:
        file = folder / "chat_template.jinja"
        if file.exists():
            return file.read_text()
        template = self._settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {entry["name"]: entry["template"] for entry in template}
            return named.get("default")
        return template

    def _compile(self, source: str | None) -> jinja2.Template | None:
        if source is None:
            return None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = refuse
        environment.filters["tojson"] = _tojson
        try:
            return environment.from_string(source)
        except jinja2.TemplateError as error:
            raise WeightsError(f"the chat template does not compile: {error}") from None

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer. Raises ApiError."""
        if self._template is None:
            raise ApiError("invalid_request", "this model has no chat template")
        specials = {name: self._special(name) for name in ("bos_token", "eos_token", "pad_token")}
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **specials
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ApiError(
                "invalid_request", f"the model's chat template refuses this: {error}", "messages"
            ) from None
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _special(self, name: str) -> str:
        value: Any = self._settings.get(name) or ""
        return value if isinstance(value, str) else value.get("content", "")

    def stream(self) -> TextStream:
        return TextStream(self.tokenizer)

    def piece(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False)


class TextStream:
    """Ids of one answer -> text deltas; characters that span tokens come out whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._sent = 0

    def feed(self, ids: list[int]) -> str:
        deltas = [self._stream.step(self._tokenizer, token) or "" for token in ids]
        self._ids += ids
        delta = "".join(deltas)
        self._sent += len(delta)
        return delta

    def flush(self) -> str:
        """What is left at the end: an incomplete character comes out as U+FFFD."""
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)[self._sent :]


def _tojson(value: Any, indent: int | None = None) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, indent=indent)
