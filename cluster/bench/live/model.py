"""The model that is served when none is given: a random Llama whose every token is visible text.

A random model answers with tokens of its whole vocabulary. With the byte tokenizer of the engine's
bench most of them would be no text, and clients see only text. So the vocabulary is made of
printable characters and of words, deterministically.
"""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ....engine.bench.models import SHAPES, write_checkpoint
from ....loadtests.prompts import CANDIDATES

SHAPE = "205M"  #: name of the model's shape, after its number of weights
WORDS = 12_000  #: random words that the tokenizer is trained on: more than the 8192 tokens need
SYLLABLES_LIMIT = 4  #: of a random word, which has two syllables at least
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Write the random checkpoint with its tokenizer and chat template; return the folder."""
    write_checkpoint(SHAPE, folder)
    tokenizer = word_tokenizer(SHAPES[SHAPE]["vocab_size"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of exactly `vocab_size` tokens, the same one at each call.

    Every token has a text, for clients time what they see, but for the two special ones, which a random
    model draws as rarely as any other. Raises ValueError if the training ended
    with fewer tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # `ByteLevel` writes each byte as one character: a printable one as it is, a space as Ġ and a
    # newline as Ċ. Only these are in the alphabet, so no token is a piece of a character.
    visible = [character for character in string.printable if character.isprintable()]
    alphabet = [*(character for character in visible if character != " "), "Ġ", "Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens were made, expected {vocab_size}")
    return tokenizer


def _corpus() -> list[str]:
    """Return lines of words; the load test's own words are so frequent that each is one token."""
    rng = random.Random(0)
    lines = [" " + " ".join(CANDIDATES)] * 100
    for _ in range(WORDS):
        syllables = rng.randint(2, SYLLABLES_LIMIT)
        word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(syllables))
        lines.append(f" {word}" * 2)
    return lines
