"""Requests of a simulation, what their answers must be, and clients that ask again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from diptych.cluster.gateway.attempt.generator import Generator
from diptych.cluster.gateway.attempt.journal import Journal
from diptych.cluster.gateway.attempt.request import Answer, AnswerUpdate, Request
from diptych.cluster.gateway.errors import ApiError
from diptych.engine.options import EngineOptions, SchedulerLimits
from diptych.engine.sequence import Sequence
from diptych.kv_transfer.identity import block_hashes
from diptych.protos.frames import Sampling, Token

from .clock import VirtualLoop
from .engine import SALT, VOCAB, HashEngine

PROMPT_TOKENS = (1, 20, 63, 64, 65, 130, 300, 500)
ANSWER_TOKENS = (1, 2, 5, 20, 60)
ANSWERS = (1, 1, 1, 1, 2, 3)
CONVERSATIONS = 4  #: Prompts of one conversation are prefixes of each other.
ASK_AGAIN_S = 0.2

Answers = tuple[tuple[Token, ...], ...]  #: the tokens of each answer to a prompt


@dataclass(frozen=True)
class Question:
    """A prompt and how it is to be answered."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling


def draw_question(draw: random.Random) -> Question:
    """Returns a question; those of few conversations share their prompts' beginnings."""
    conversation = random.Random(draw.randrange(CONVERSATIONS))
    length = draw.choice(PROMPT_TOKENS)
    prompt_ids = tuple(conversation.randrange(VOCAB) for _ in range(length))
    is_greedy = draw.random() < 0.5
    sampling = Sampling(
        max_tokens=draw.choice(ANSWER_TOKENS),
        temperature=0.0 if is_greedy else 1.0,
        seed=0 if is_greedy else draw.randrange(3),
        stop_ids=() if draw.random() < 0.7 else (draw.randrange(VOCAB),),
        logprobs=None if draw.random() < 0.8 else 2,
        frequency_penalty=0.0 if draw.random() < 0.8 else 0.5,
        n=1 if is_greedy else draw.choice(ANSWERS),
    )
    return Question(prompt_ids, sampling)


@lru_cache(maxsize=4096)
def right_answers(question: Question) -> Answers:
    """Returns what an engine answers that has nothing else to do."""
    engine = HashEngine(EngineOptions("hash", limits=SchedulerLimits()), blocks=64)  # type: ignore[arg-type]
    ids = list(question.prompt_ids)
    hashes = block_hashes(ids, SALT)
    engine.add(Sequence(("alone", 0), ids, len(ids), question.sampling, hashes, False))
    answers: list[list[Token]] = [[] for _ in range(question.sampling.n)]
    for _ in range(10_000):
        for output in engine.step():
            assert not output.error, output
            if output.token is not None:
                answers[output.answer_index].append(output.token)
        if not engine.scheduler.live:
            return tuple(map(tuple, answers))
    raise AssertionError("an engine alone has not answered")


@dataclass
class ClientSink:
    """What a client gets: the tokens of each answer, in order."""

    tokens: list[list[Token]]
    finish_reasons: list[str | None]
    held_bytes: int = 0

    def push(self, updates: list[AnswerUpdate]) -> bool:
        for update in updates:
            index = update.answer_index
            assert self.finish_reasons[index] is None, "tokens came behind the end"
            self.tokens[index] += update.tokens
            self.finish_reasons[index] = update.finish_reason
        return True

    def replay(self, updates: list[AnswerUpdate]) -> None:
        """The client has these already."""

    async def drain(self) -> None:
        """The client takes everything at once."""


@dataclass
class Asked:
    """One client's question and what came of it."""

    number: int
    question: Question
    began_at_s: float
    tokens: list[list[Token]] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    ended_at_s: float | None = None
    error: str = ""  #: why it got no whole answer
    tries: int = 0
    left: bool = False  #: the client did not wait for the end

    def fault(self) -> str:
        """Returns what is wrong with the answers so far; empty: nothing."""
        right = right_answers(self.question)
        is_whole = self.ended_at_s is not None and not self.error and not self.left
        for index, (tokens, wanted) in enumerate(zip(self.tokens, right, strict=True)):
            got = tuple(tokens)
            if got != wanted[: len(got)] or (is_whole and got != wanted):
                return f"answer {index} of question {self.number}: {len(got)} tokens, not as alone"
        return ""


class Client:
    """Asks gateways, and asks another one where one has died under its answer."""

    def __init__(
        self,
        loop: VirtualLoop,
        draw: random.Random,
        gateways: Callable[[], dict[str, Generator]],
    ) -> None:
        """`gateways` returns those that live, by the names of their processes."""
        self._loop = loop
        self._draw = draw
        self._gateways = gateways

    async def ask(self, asked: Asked, leaves_after_s: float | None = None) -> None:
        """Asks until the answers are whole or a gateway says that there are none."""
        count = asked.question.sampling.n
        asked.tokens = [[] for _ in range(count)]
        asked.finish_reasons = [None] * count
        try:
            async with asyncio.timeout(leaves_after_s):
                while True:
                    if await self._try(asked):
                        break
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError:
            asked.left = True
        except ApiError as error:
            asked.error = f"{error.reason}: {error}"
        asked.ended_at_s = self._loop.time()

    async def _try(self, asked: Asked) -> bool:
        """Asks one gateway; False: it has died, or there is none. Raises ApiError."""
        living = self._gateways()
        if not living:
            return False
        asked.tries += 1
        process = self._draw.choice(sorted(living))
        request, sink = self._prepare(asked)
        task = self._loop.spawn(process, living[process].run(request, sink))
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        if task.cancelled():
            return all(asked.finish_reasons)  # the gateway may have died behind the last token
        task.result()
        return True

    def _prepare(self, asked: Asked) -> tuple[Request, ClientSink]:
        """Returns the request, which goes on behind what the client has of a single answer."""
        question = asked.question
        answers = None
        if question.sampling.n == 1:
            answers = [Answer(journal=Journal(asked.tokens[0]))]
        else:
            for tokens in asked.tokens:  # several answers are asked for anew
                tokens.clear()
            asked.finish_reasons[:] = [None] * question.sampling.n
        request = Request(
            f"q{asked.number}",
            list(question.prompt_ids),
            block_hashes(list(question.prompt_ids), SALT),
            question.sampling,
            salt=SALT,
            wire_id=f"q{asked.number}~{asked.tries}",
            answers=answers,
        )
        return request, ClientSink(asked.tokens, asked.finish_reasons)
