"""Where a model's thinking ends (pure): its tags as tokens, and the grammar of what it thinks.

A grammar binds an answer from its first token on. So what a model thinks before it answers is part
of the grammar: any text up to the closing tag.
"""

from __future__ import annotations

from .formats import harmony
from .formats.reasoning import HARMONY_REASONING, ContentState
from .formats.registry import HARMONY, lark_text
from .tokenizer import ChatTokenizer, TokenizedPrompt

#: A regular expression of Lark for any text without special tokens.
ANY_TEXT = "/(?s:.*)/"
#: White space with which models set their answers off from their thinking.
GAP = r"/\n{0,2}/"
HARMONY_PROMPT_END = f"{harmony.START}assistant"
HARMONY_THOUGHT_OPENING = f"{harmony.CHANNEL}{harmony.ANALYSIS}{harmony.MESSAGE}"


def thinks(tokenizer: ChatTokenizer) -> bool:
    """Return whether the model was trained to think: its tag is in template and vocabulary."""
    return any(
        tag in tokenizer.template and tokenizer.tokenizer.token_to_id(tag) is not None
        for tag in tokenizer.reasoning_format.markers
    )


def closing_tag_id(tokenizer: ChatTokenizer) -> int | None:
    """Return the id of the tag that ends the model's thinking; None if it is not one token."""
    for tag in tokenizer.reasoning_format.closing:
        token_id: int | None = tokenizer.tokenizer.token_to_id(tag)
        if token_id is not None:
            return token_id
    return None


def opening_tag_ids(tokenizer: ChatTokenizer) -> list[int]:
    """Return the ids of the tags that thinking may begin with."""
    reasoning = tokenizer.reasoning_format
    tags = (*reasoning.opening, *reasoning.special_tokens)
    token_ids = (tokenizer.tokenizer.token_to_id(tag) for tag in tags)
    return [token_id for token_id in token_ids if token_id is not None]


def thinking_terms(
    tokenizer: ChatTokenizer, prompt: TokenizedPrompt, *, answers_in_text: bool
) -> str:
    """Return the Lark terms of the thinking in front of an answer that a grammar binds.

    The terms are empty for a model that does not think, behind a prompt that leaves no room for
    thinking, and where the closing tag is not one token. `answers_in_text`: the answer is no call,
    which matters to Harmony alone: there the header of the answer is among the terms.
    """
    if tokenizer.reasoning_format is HARMONY_REASONING:
        return _harmony_terms(tokenizer, prompt.text_end, answers_in_text=answers_in_text)
    closing_id = closing_tag_id(tokenizer)
    if closing_id is None or not thinks(tokenizer):
        return ""
    thought = f"{ANY_TEXT} <[{closing_id}]> {GAP}"
    match tokenizer.reasoning_format.state_behind(prompt.text_end, prompt.open_text):
        case ContentState.THINKING:
            return thought
        case ContentState.START:
            openings = [
                lark_text(tag, tokenizer.grammar_ids)
                for tag in tokenizer.reasoning_format.opening
                if tag in tokenizer.template
            ]
            return f"(({' | '.join(openings)}) {thought})?" if openings else ""
        case _:
            return ""


def _harmony_terms(tokenizer: ChatTokenizer, prompt_end: str, *, answers_in_text: bool) -> str:
    """Return the terms of a message of analysis, and of the header of the final message."""
    token_ids = tokenizer.grammar_ids
    if not prompt_end.endswith(HARMONY_PROMPT_END) or harmony.CHANNEL not in token_ids:
        return ""
    opening = lark_text(HARMONY_THOUGHT_OPENING, token_ids)
    closing = lark_text(f"{harmony.END}{HARMONY_PROMPT_END}", token_ids)
    terms = f"({opening} {ANY_TEXT} {closing})?"
    if answers_in_text and HARMONY.grammar is not None:
        terms += f" {lark_text(HARMONY.grammar.text_opening, token_ids)}"
    return terms
