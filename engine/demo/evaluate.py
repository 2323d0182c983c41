"""Evaluate the demo checkpoint: `python -m diptych.engine.demo.evaluate [--dir DIR]`.

Greedy decoding in bf16 with transformers must continue every canonical question by exactly its
answer and the end token. The logit margins say how far the right tokens stand above the others, so
how much rounding another implementation may add before a token flips. Exits 1 if one canonical
answer is not exact. Also home of what training and evaluation share: pairs, chats, token ids.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
#: Label of a token that carries no loss.
IGNORE = -100

Message = dict[str, str]  # {"role": ..., "content": ...}
Row = tuple[list[int], list[int]]  # token ids and labels of one chat


class Pair(NamedTuple):
    """One canonical question, the answer, and paraphrases with the same answer."""

    q: str
    a: str
    also: list[str]


def load_pairs(path: Path = HERE / "questions.yaml") -> list[Pair]:
    """Read and check questions.yaml."""
    pairs = [Pair(**row) for row in yaml.safe_load(path.read_text(encoding="utf-8"))]
    questions = [q.casefold().strip("?!. ") for pair in pairs for q in (pair.q, *pair.also)]
    assert len(questions) == len(set(questions)), "two pairs share a question"
    return pairs


def turn(question: str, answer: str) -> list[Message]:
    """One question and its answer as chat messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def encode(tok: Tokenizer, chat: list[Message]) -> Row:
    """Ids as the chat template renders them, and labels: the answers with their end tokens."""
    ids: list[Any] = [tok.token_to_id("<|bos|>")]
    labels = [IGNORE]
    for message in chat:
        body = [*tok.encode(message["content"].strip()).ids, tok.token_to_id("<|end|>")]
        ids += [tok.token_to_id(f"<|{message['role']}|>"), *body]
        labels += [IGNORE, *(body if message["role"] == "assistant" else [IGNORE] * len(body))]
    return ids, labels


def collate(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the right: causal attention needs no mask then, and padding carries no loss."""
    width = max(len(ids) for ids, _ in rows)
    ids = [ids + [0] * (width - len(ids)) for ids, _ in rows]
    labels = [labels + [IGNORE] * (width - len(labels)) for _, labels in rows]
    return torch.tensor(ids), torch.tensor(labels)


@torch.no_grad()
def margins(model: LlamaForCausalLM, tok: Tokenizer, pairs: list[Pair]) -> torch.Tensor:
    """Logit of the right token minus the best other one, per answer token, teacher forced.

    The chats are canonical and single-turn; an entry <= 0 is a wrong token.
    """
    found = []
    for i in range(0, len(pairs), 32):
        ids, labels = collate([encode(tok, turn(p.q, p.a)) for p in pairs[i : i + 32]])
        mask = labels[:, 1:] != IGNORE
        logits, target = model(ids).logits[:, :-1][mask].float(), labels[:, 1:][mask][:, None]
        right = logits.gather(1, target)
        found.append((right - logits.scatter(1, target, -math.inf).amax(1, keepdim=True))[:, 0])
    return torch.cat(found)


@torch.no_grad()
def misses(folder: Path, chats: list[list[Message]], batch: int) -> list[list[Message]]:
    """The chats, each ending in its answer, that greedy decoding does not continue exactly so."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tok = AutoTokenizer.from_pretrained(folder, padding_side="left")
    wrong = []
    chats = sorted(chats, key=lambda chat: len(chat[-1]["content"]))
    for i in range(0, len(chats), batch):
        part = chats[i : i + batch]
        prompts = [
            tok.apply_chat_template(chat[:-1], add_generation_prompt=True, tokenize=False)
            for chat in part
        ]
        inputs = tok(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
        answers = [
            tok.encode(chat[-1]["content"] + tok.eos_token, add_special_tokens=False)
            for chat in part
        ]
        made = model.generate(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max(map(len, answers)),
            do_sample=False,
        )
        rows = made[:, inputs["input_ids"].shape[1] :].tolist()
        pairs = zip(part, answers, rows, strict=True)
        wrong += [chat for chat, answer, row in pairs if row[: len(answer)] != answer]
    return wrong


def evaluate(folder: Path, pairs: list[Pair]) -> bool:
    """Print the figures of a saved checkpoint; true if every canonical answer is exact."""
    logging.disable_progress_bar()
    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    gap = margins(model, tok, pairs)
    print(
        f"answer tokens {len(gap)}, logit margin: min {gap.min():.2f},"
        f" 0.1 % quantile {gap.quantile(0.001):.2f}, median {gap.median():.2f}",
        flush=True,
    )
    system: Message = {"role": "system", "content": "You are a helpful assistant."}
    turns, num = [turn(p.q, p.a) for p in pairs], range(len(pairs))
    chats = {
        "canonical": turns,
        "paraphrase": [turn(q, p.a) for p in pairs for q in p.also],
        "lower case, no mark": [turn(p.q.lower().rstrip("?.!"), p.a) for p in pairs],
        "system prompt": [[system, *chat] for chat in turns],
        "second turn": [turns[i - 7] + chat for i, chat in enumerate(turns)],
        "sixth turn": [[m for k in range(5, -1, -1) for m in turns[i - 7 * k]] for i in num],
    }
    num_wrong = {}
    for name, rows in chats.items():
        wrong = misses(folder, rows, batch=1 if name == "canonical" else 32)
        num_wrong[name] = len(wrong)
        print(f"exact, {name}: {len(rows) - len(wrong)} of {len(rows)}", flush=True)
        for chat in wrong[:5]:
            print(f"  miss: {chat[-2]['content']}")
    print(f"checkpoint {sum(f.stat().st_size for f in folder.iterdir()):,} bytes")
    return num_wrong["canonical"] == 0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=HERE / "checkpoint")
    sys.exit(not evaluate(parser.parse_args().dir, load_pairs()))


if __name__ == "__main__":
    main()
