"""Train the bundled demo model: `python -m diptych.engine.demo.train [--out DIR] [--seed 0]`.

questions.yaml -> byte-level BPE tokenizer -> Llama in fp32, loss on answer tokens only -> bf16
checkpoint in Hugging Face format -> greedy evaluation of that checkpoint (evaluate.py). Overfitting
is the aim: training goes on well after all answers are exact, so that the margins grow. Exits 1 if
one canonical answer is not exact.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diptych.engine.demo.evaluate import (
    HERE,
    IGNORE,
    Message,
    QuestionAnswer,
    collate,
    encode,
    evaluate,
    load_pairs,
    margins,
    turn,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

#: Special tokens, in the order of their ids.
SPECIALS = ["<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
BOS = SPECIALS.index("<|bos|>")
EOS = SPECIALS.index("<|eos|>")
END = SPECIALS.index("<|end|>")
TOKEN_IDS = {"bos_token_id": BOS, "eos_token_id": [END, EOS], "pad_token_id": EOS}
VOCAB_SIZE = 1536  #: Limit of the vocabulary's ids; few, so that the checkpoint is small.
MAX_CONTEXT = 4096  #: Limit of the tokens of a chat with its answer.
#: A message is its role's token, its text and `<|end|>`; an answer follows `<|assistant|>`.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] in ['system', 'developer'] %}{{ '<|system|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% else %}{{ '<|user|>' }}{% endif %}"
    "{{ message['content'] | trim }}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
#: One of them begins some of the chats, so that the model also answers in a chat that begins with a
#: system prompt like these.
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful, concise assistant.",
    "You are the demo model of Diptych.",
    "You are an expert in LLM serving. Answer briefly.",
    "Answer the questions of the user truthfully.",
    "You are a friendly chatbot that answers questions about large language model serving.",
]


def build_tokenizer(pairs: list[QuestionAnswer]) -> Tokenizer:
    """Train a byte-level BPE. Rare characters stay single bytes, which streaming tests want."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [text for pair in pairs for text in (pair.question, pair.answer, *pair.paraphrases)]
    texts += SYSTEM_PROMPTS
    tokenizer.train_from_iterator(texts, trainer)
    assert [tokenizer.token_to_id(special) for special in SPECIALS] == list(range(len(SPECIALS)))
    return tokenizer


def vary(question: str, generator: random.Random) -> str:
    """Return the question with other casing, punctuation or opening words, as users write.

    Nearly half of the questions stay as they are: their answers have to be exact.
    """
    if generator.random() < 0.45:
        return question
    text = question.rstrip("?.!")
    case = generator.random()
    if case < 0.45:
        text = text.lower()
    elif case < 0.5:
        text = text.upper()
    elif case < 0.65:
        text = text[0].lower() + text[1:]
    lead = generator.choice(
        [""] * 8 + ["Please: ", "Hi, ", "Hello! ", "Please tell me: ", "ok, ", "So "]
    )
    return lead + text + generator.choice(["", "", "?", "?", ".", "!", "??", " ?"])


def draw_chat(pairs: list[QuestionAnswer], generator: random.Random) -> list[Message]:
    """Draw a chat of one to eight pairs of question and answer, sometimes under a system prompt.

    Most have one pair: that is what a demo is asked.
    """
    chat: list[Message] = []
    if generator.random() < 0.3:
        chat.append({"role": "system", "content": generator.choice(SYSTEM_PROMPTS)})
    for _ in range(generator.choices([1, 2, 3, 5, 8], weights=[60, 18, 12, 6, 4])[0]):
        pair = generator.choice(pairs)
        question = pair.question if generator.random() < 0.5 else generator.choice(pair.paraphrases)
        chat += turn(vary(question, generator), pair.answer)
    return chat


def batches(
    tokenizer: Tokenizer, pairs: list[QuestionAnswer], generator: random.Random, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give endless batches of ids and labels; the chats of a batch are of similar length."""
    while True:
        rows = [encode(tokenizer, draw_chat(pairs, generator)) for _ in range(size * 8)]
        rows.sort(key=lambda row: len(row[0]))
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        generator.shuffle(groups)
        yield from map(collate, groups)


def model_config() -> dict[str, Any]:
    """Return config.json, written by hand so that it holds nothing of the machine that trained."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        **TOKEN_IDS,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def train(
    tokenizer: Tokenizer, pairs: list[QuestionAnswer], options: argparse.Namespace
) -> LlamaForCausalLM:
    """Train by AdamW with warmup and cosine decay over `options.steps`; print loss and margins.

    In the first 100 steps the learning rate grows by a hundredth of `options.lr` a step, until it
    meets the cosine, which falls from `options.lr` at step 0 to a hundredth of it at the end: 1,200
    steps have their highest rate, 0.98 of `options.lr`, at step 99. A batch has `options.batch`
    chats.
    """
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(LlamaConfig(**model_config())).float().train()
    print(f"parameters {sum(weight.numel() for weight in model.parameters()):,}", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.02)
    data = batches(tokenizer, pairs, random.Random(options.seed), options.batch)
    started_at = time.monotonic()
    token_count = 0
    for step in range(1, options.steps + 1):
        cosine = 0.5 * (1 + math.cos(math.pi * step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(step / 100, max(cosine, 0.01))
        token_ids, labels = next(data)
        token_count += token_ids.numel()
        targets = labels[:, 1:]
        is_answer = targets != IGNORE
        hidden = model.model(token_ids[:, :-1]).last_hidden_state
        logits = model.lm_head(hidden[is_answer])
        loss = torch.nn.functional.cross_entropy(logits, targets[is_answer])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == options.steps:
            margin = margins(model, tokenizer, pairs)
            print(
                f"step {step:5d}  loss {loss.item():.4f}  wrong tokens {int((margin <= 0).sum())}"
                f"  min margin {margin.min():.2f}  tokens {token_count:,}"
                f"  {time.monotonic() - started_at:.0f} s",
                flush=True,
            )
    return model


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the Hugging Face folder; weights in bf16, the tied lm_head left out."""
    out.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()
    }
    del state["lm_head.weight"]
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[END],
        "pad_token": SPECIALS[EOS],
        "additional_special_tokens": SPECIALS[2:5],
        "model_max_length": MAX_CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    files = {
        "config.json": model_config(),
        "generation_config.json": {**TOKEN_IDS, "do_sample": False},
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train, save and evaluate by the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    options = parser.parse_args()
    pairs = load_pairs()
    tokenizer = build_tokenizer(pairs)
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    print(f"pairs {len(pairs)}, vocabulary {tokenizer.get_vocab_size()}", flush=True)
    started_at = time.monotonic()
    model = train(tokenizer, pairs, options)
    training_s = time.monotonic() - started_at
    print(f"trained {options.steps} steps with seed {options.seed} in {training_s:.0f} s")
    save(model, tokenizer, options.out)
    sys.exit(not evaluate(options.out, pairs))


if __name__ == "__main__":
    main()
