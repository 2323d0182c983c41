"""Makes the small models that vLLM's tests are run against. Nothing is downloaded.

`closing_demo` is the bundled demo model: it ends its answers, which most of vLLM's tests rely on, and inside a grammar
it closes what it has opened. `thinking_demo` is that with a template that opens `<think>`; its thinking ends where a
grammar or a budget asks for that, and elsewhere with the answer. `random_llama` is a random Llama that seldom ends; the first run used such a model.
Both have 8,192 tokens, and a ChatML template with tools as Hermes models know them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diptych.engine.demo import CHECKPOINT
from diptych.engine.demo.evaluate import load_pairs
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM

from tests.support import checkpoints

VOCABULARY_SIZE = 8192
#: Positions that the models know. The server is started with `SERVED_CONTEXT`, which vLLM's tests expect.
CONTEXT = 16384
SERVED_CONTEXT = 8192
RANDOM_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = r"""
{%- if messages[0].role in ['system', 'developer'] %}
    {%- set system = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = 'You are a helpful assistant.' %}
    {%- set turns = messages %}
{%- endif %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}
    {{- '\n\nYou may call functions. They are within <tools></tools>:\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\nFor each call return a json object within <tool_call></tool_call>:\n<tool_call>\n' }}
    {{- '{"name": <name>, "arguments": <arguments>}\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>' }}
{%- for message in turns %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'tool' %}
        {{- '\n<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response>' }}
    {%- else %}
        {{- '\n<|im_start|>' + message.role + '\n' }}
        {%- if loop.last and message.role == 'assistant' and enable_thinking is defined and not enable_thinking %}
            {{- '<think>\n\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{{- '\n' }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
#: What `thinking_demo` has in place of ChatML's last line: it opens the thinking, unless told not to. No line feed
#: follows the tag, as a test counts the tokens behind it.
OPENED_THINKING = r"""
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}
    {%- else %}{{ '<think>' }}{% endif %}
{%- endif %}"""
#: Tokens as Qwen 3 has them: tags of their own, and not special.
THINKING_TAGS = ["<think>", "</think>"]
#: The demo model's tokens for roles, under ChatML's names: what it was trained on then reads as ChatML.
CHATML_NAMES = {
    "<|system|>": "<|im_start|>system\n",
    "<|user|>": "\n<|im_start|>user\n",
    "<|assistant|>": "\n<|im_start|>assistant\n",
    "<|end|>": "<|im_end|>",
}
#: Texts that close something in JSON, in the order in which the model prefers them where no answer may end.
CLOSING_TEXTS = ['"', "}", "]", ",", ":"]
#: What is subtracted from the logits of tokens that are chosen only where nothing else is admitted.
LAST_CHOICE_STRENGTH = 60.0
#: One token here, as in the tokenizers of the tests' models: a test counts the tokens of "Hello, my name is".
WHOLE_WORDS = ["Hello"]


def closing_demo(folder: Path) -> Path:
    """Write the demo model to `folder`, changed so that it closes strings and objects, and return the folder.

    Where the demo model would end its answer and a grammar forbids the end, the next best token is arbitrary, and
    strings would grow to the length limit. So the closing tokens' logits are made to lie just below the logit of the
    end: unconstrained answers end as before, constrained ones close. White space and digits are
    generated only where nothing else is admitted, so neither indentation nor numbers grow. Nor are the tokens beyond
    the demo model's vocabulary, whose logprobs tests ask for by id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config |= {
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_bytes(
        (CHECKPOINT / "generation_config.json").read_bytes()
    )

    demo_tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    weights = load_file(CHECKPOINT / "model.safetensors")
    save_file(_with_closing_rows(weights, demo_tokenizer), folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(json.dumps(_chatml_tokenizer(demo_tokenizer)))
    _write_tokenizer_settings(folder)
    return folder


def thinking_demo(folder: Path) -> Path:
    """Write `closing_demo` with tags of thinking to `folder`, and return the folder.

    The closing tag comes where the answer would end and may not. Behind it the model answers as behind the token that
    begins an answer.
    """
    closing_demo(folder)
    path = folder / "tokenizer.json"
    description = json.loads(path.read_text())
    vocabulary: dict[str, int] = description["model"]["vocab"]
    for number, tag in enumerate(THINKING_TAGS):
        token_id = VOCABULARY_SIZE - len(THINKING_TAGS) + number
        vocabulary.pop(f"<unused{token_id}>")
        vocabulary[tag] = token_id
        added = {"id": token_id, "content": tag, "special": False, "normalized": False}
        rest = {"single_word": False, "lstrip": False, "rstrip": False}
        description["added_tokens"].append(added | rest)
    path.write_text(json.dumps(description))

    demo_tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    weights = load_file(folder / "model.safetensors")
    answer_row = weights["model.embed_tokens.weight"][demo_tokenizer.token_to_id("<|assistant|>")]
    output_rows = weights["lm_head.weight"]
    end_row = output_rows[demo_tokenizer.token_to_id("<|end|>")]
    one_logit = (
        -output_rows[-1] / LAST_CHOICE_STRENGTH
    )  # the row of a token that is nobody's choice
    output_rows[-1] = end_row - one_logit / 2  # the closing tag: in front of all that closes
    weights["model.embed_tokens.weight"][-1] = answer_row
    save_file(weights, folder / "model.safetensors")

    before, _ = CHATML.split("\n    {%- if enable_thinking")
    _write_tokenizer_settings(folder, before + OPENED_THINKING)
    return folder


def _with_closing_rows(
    weights: dict[str, torch.Tensor], tokenizer: Tokenizer
) -> dict[str, torch.Tensor]:
    """Return the weights with rows for all tokens, and an output layer that prefers to close."""
    embeddings = weights["model.embed_tokens.weight"]
    known, width = embeddings.shape
    unused = VOCABULARY_SIZE - known
    no_embeddings = torch.zeros(unused, width, dtype=embeddings.dtype)
    one_logit = _shared_direction(tokenizer).to(embeddings.dtype)
    last_choice = -LAST_CHOICE_STRENGTH * one_logit

    output_rows = torch.cat([embeddings, last_choice.repeat(unused, 1)])
    for token_id in range(known):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if text.isspace() or text.strip().isdigit():
            output_rows[token_id] = last_choice
    end_row = embeddings[tokenizer.token_to_id("<|end|>")]
    for rank, text in enumerate(CLOSING_TEXTS, start=1):
        [token_id] = tokenizer.encode(text, add_special_tokens=False).ids
        output_rows[token_id] = end_row - rank * one_logit

    return weights | {
        "model.embed_tokens.weight": torch.cat([embeddings, no_embeddings]),
        "lm_head.weight": output_rows,
    }


def _shared_direction(tokenizer: Tokenizer) -> torch.Tensor:
    """Return a vector whose product with the demo model's last hidden state is near one, whatever the text is.

    It is fitted to the hidden states of all questions with their answers, and of a tool call.
    """
    model = LlamaForCausalLM.from_pretrained(CHECKPOINT)
    system = "<|system|>You are a helpful assistant.<|end|>"
    texts = [
        f"{system}<|user|>{pair.question}<|end|><|assistant|>{pair.answer}" for pair in load_pairs()
    ]
    texts.append('<tool_call>\n{"name": "find", "arguments": {"a": "b", "c": 12.5}}\n</tool_call>')
    with torch.no_grad():
        states = [
            model.model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0].float()
            for text in texts
        ]
    hidden = torch.cat(states)
    return torch.linalg.lstsq(hidden, torch.ones(len(hidden), 1)).solution[:, 0]


def _chatml_tokenizer(tokenizer: Tokenizer) -> dict[str, object]:
    """Return the demo model's tokenizer, as JSON, with ChatML's names and 8,192 tokens."""
    description = json.loads(tokenizer.to_str())
    vocabulary: dict[str, int] = description["model"]["vocab"]
    merges: list[list[str]] = description["model"]["merges"]
    for token in description["added_tokens"]:
        name = CHATML_NAMES.get(token["content"], token["content"])
        vocabulary.pop(token["content"], None)
        vocabulary[name] = token["id"]
        token["content"] = name
    for word in WHOLE_WORDS:
        merged, *others = tokenizer.encode(word, add_special_tokens=False).tokens
        for piece in others:
            merges.append([merged, piece])
            merged += piece
            vocabulary.setdefault(merged, len(vocabulary))
    for token_id in range(len(vocabulary), VOCABULARY_SIZE):
        vocabulary[f"<unused{token_id}>"] = token_id
    return description


def random_llama(folder: Path, corpus: list[Path], seed: int = 0) -> Path:
    """Write a random Llama of 2.5 M parameters to `folder` and return the folder.

    `corpus`: text files from which the byte-level BPE vocabulary is trained.
    """
    checkpoints.make(
        folder,
        "llama",
        seed,
        vocab_size=VOCABULARY_SIZE,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=2,
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=RANDOM_SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in corpus], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    _write_tokenizer_settings(folder)
    return folder


def _write_tokenizer_settings(folder: Path, template: str = CHATML) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
