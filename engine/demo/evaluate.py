"""Evaluate the demo checkpoint: `python -m diptych.engine.demo.evaluate [--dir DIR]`.

Greedy decoding in bf16 with transformers must continue every canonical question by exactly its
answer and the end token. The logit margins say how far the right tokens stand above the others, so
how much rounding another implementation may add before a token flips. Exits 1 if one canonical
answer is not exact.

This module is also home of what training and evaluation share: questions, chats, token ids.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

#: This folder: it has questions.yaml and the checkpoint.
HERE = Path(__file__).resolve().parent

#: Label of a token that carries no loss: torch's cross entropy skips it.
IGNORE = -100

#: One message of a chat: {"role": ..., "content": ...}.
Message = dict[str, str]

#: The token ids of one chat, and as many labels: the id itself, or `IGNORE`.
LabelledIds = tuple[list[int], list[int]]

#: A later turn follows other questions; each stands so many places before the next in the file.
TURN_STRIDE = 7

#: Chats whose logits are computed together.
MARGIN_BATCH = 32


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """One canonical question, the answer, and paraphrases with the same answer."""

    question: str
    answer: str
    paraphrases: list[str]


def load_pairs(path: Path = HERE / "questions.yaml") -> list[QuestionAnswer]:
    """Read questions.yaml, and check that no two pairs share a question.

    A shared one could not have both answers. Case and the marks at the end make no difference.
    """
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    pairs = [
        QuestionAnswer(question=entry["q"], answer=entry["a"], paraphrases=entry["also"])
        for entry in entries
    ]
    questions = [
        question.casefold().strip("?!. ")
        for pair in pairs
        for question in (pair.question, *pair.paraphrases)
    ]
    assert len(questions) == len(set(questions)), "two pairs share a question"
    return pairs


def turn(question: str, answer: str) -> list[Message]:
    """Return one question and its answer as chat messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def encode(tokenizer: Tokenizer, chat: list[Message]) -> LabelledIds:
    """Return ids as the chat template renders them, and labels: answers with their end tokens.

    A label stands at its own token; whoever compares it with logits shifts by one.
    """
    token_ids: list[Any] = [tokenizer.token_to_id("<|bos|>")]
    labels = [IGNORE]
    for message in chat:
        text_ids = tokenizer.encode(message["content"].strip()).ids
        body = [*text_ids, tokenizer.token_to_id("<|end|>")]
        token_ids += [tokenizer.token_to_id(f"<|{message['role']}|>"), *body]
        is_answer = message["role"] == "assistant"
        labels += [IGNORE, *(body if is_answer else [IGNORE] * len(body))]
    return token_ids, labels


def collate(rows: list[LabelledIds]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, int64 [rows, width], padded on the right.

    Causal attention needs no mask then, and padding carries no loss.
    """
    width = max(len(token_ids) for token_ids, _ in rows)
    padded_ids = [token_ids + [0] * (width - len(token_ids)) for token_ids, _ in rows]
    padded_labels = [labels + [IGNORE] * (width - len(labels)) for _, labels in rows]
    return torch.tensor(padded_ids), torch.tensor(padded_labels)


@torch.no_grad()
def margins(
    model: LlamaForCausalLM, tokenizer: Tokenizer, pairs: list[QuestionAnswer]
) -> torch.Tensor:
    """Return, per answer token, the right token's logit minus the best other one, teacher forced.

    The chats are canonical and single-turn; a margin <= 0 is a wrong token.
    """
    found: list[torch.Tensor] = []
    for start in range(0, len(pairs), MARGIN_BATCH):
        batch = pairs[start : start + MARGIN_BATCH]
        chats = [turn(pair.question, pair.answer) for pair in batch]
        token_ids, labels = collate([encode(tokenizer, chat) for chat in chats])
        is_answer = labels[:, 1:] != IGNORE
        # The logits at a token are those of the next one.
        logits = model(token_ids).logits[:, :-1][is_answer].float()
        targets = labels[:, 1:][is_answer][:, None]
        right = logits.gather(1, targets)
        best_other = logits.scatter(1, targets, -math.inf).amax(1, keepdim=True)
        found.append((right - best_other)[:, 0])
    return torch.cat(found)


@torch.no_grad()
def misses(folder: Path, chats: list[list[Message]], batch: int) -> list[list[Message]]:
    """Return the chats, each ending in its answer, that greedy decoding does not continue so.

    `batch` chats with answers of similar length are decoded together, padded on the left.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    wrong: list[list[Message]] = []
    chats = sorted(chats, key=lambda chat: len(chat[-1]["content"]))
    for start in range(0, len(chats), batch):
        part = chats[start : start + batch]
        prompts = [
            tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, tokenize=False)
            for chat in part
        ]
        inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
        answers = [
            tokenizer.encode(chat[-1]["content"] + tokenizer.eos_token, add_special_tokens=False)
            for chat in part
        ]
        generated = model.generate(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max(map(len, answers)),
            do_sample=False,
        )
        prompt_width = inputs["input_ids"].shape[1]
        generated_answers = generated[:, prompt_width:].tolist()
        for chat, answer, generated_answer in zip(part, answers, generated_answers, strict=True):
            # Behind its end token, an answer is padded to the length of the longest.
            if generated_answer[: len(answer)] != answer:
                wrong.append(chat)
    return wrong


def evaluate(folder: Path, pairs: list[QuestionAnswer]) -> bool:
    """Print the figures of a saved checkpoint; return whether every canonical answer is exact."""
    logging.disable_progress_bar()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    margin = margins(model, tokenizer, pairs)
    print(
        f"answer tokens {len(margin)}, logit margin: min {margin.min():.2f},"
        f" 0.1 % quantile {margin.quantile(0.001):.2f}, median {margin.median():.2f}",
        flush=True,
    )
    wrong_counts: dict[str, int] = {}
    for name, chats in _chat_variants(pairs).items():
        # One at a time where exactness is promised: padding could change the last bits.
        wrong = misses(folder, chats, batch=1 if name == "canonical" else 32)
        wrong_counts[name] = len(wrong)
        print(f"exact, {name}: {len(chats) - len(wrong)} of {len(chats)}", flush=True)
        for chat in wrong[:5]:
            print(f"  miss: {chat[-2]['content']}")
    print(f"checkpoint {sum(file.stat().st_size for file in folder.iterdir()):,} bytes")
    return wrong_counts["canonical"] == 0


def _chat_variants(pairs: list[QuestionAnswer]) -> dict[str, list[list[Message]]]:
    """Return the chats of each variant, by the name that is printed.

    Indices below 0 count from the end: the first questions follow the last ones.
    """
    system: Message = {"role": "system", "content": "You are a helpful assistant."}
    turns = [turn(pair.question, pair.answer) for pair in pairs]

    def sixth_turn(index: int) -> list[Message]:
        """Return six turns, of which the last is that of `index`."""
        indices = [index - TURN_STRIDE * before for before in range(5, -1, -1)]
        return [message for turn_index in indices for message in turns[turn_index]]

    return {
        "canonical": turns,
        "paraphrase": [
            turn(question, pair.answer) for pair in pairs for question in pair.paraphrases
        ],
        "lower case, no mark": [
            turn(pair.question.lower().rstrip("?.!"), pair.answer) for pair in pairs
        ],
        "system prompt": [[system, *chat] for chat in turns],
        "second turn": [turns[index - TURN_STRIDE] + chat for index, chat in enumerate(turns)],
        "sixth turn": [sixth_turn(index) for index in range(len(turns))],
    }


def main() -> None:
    """Evaluate the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=HERE / "checkpoint")
    sys.exit(not evaluate(parser.parse_args().dir, load_pairs()))


if __name__ == "__main__":
    main()
