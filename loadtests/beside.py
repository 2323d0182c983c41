"""Gaps of one stream while another's prompt is computed, on a cluster that does nothing else.

    python loadtests/beside.py [URL [ROUNDS]]

Each round: a stream of 60 tokens, and 1.2 s later a second stream, with a prompt of 900 ids. It
prints milliseconds, as the client sees them:

* `alone`: between tokens of the first stream before the second begins and after it ends;
* `beside`: between tokens of the first stream while the second's prompt is computed. Where both
  streams decode, the first one's gaps count as neither;
* `hand-over`: between the first two tokens of the second stream. The prefill worker gives the first
  one, the decode worker the others, so this gap contains the part of the KV transfer that is not
  hidden behind the prefill;
* `TTFT`: of the second stream, from its begin to its first token.

A gap counts where its later token came. So the gap in which the second stream's first token comes
is neither `alone` nor `beside`, and the gap in which its last token comes is `alone`.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time

import httpx
import numpy as np
from diptych.loadtests.loopback import is_this_machine

#: ids of the second stream's prompt: enough that computing it takes a while. The first stream's
#: prompt has a third of them.
PROMPT_TOKENS = 900
LATER_S = 1.2  #: seconds from the first stream's begin to the second's
STREAM_TOKENS = 60  #: of the first stream's answer
LETTER = 100  #: the id that every answer consists of: always text of its own, and so always a chunk


class TimedStream(threading.Thread):
    """A thread with one streamed completion, and the times at which its pieces came.

    The thread starts when it is made.
    """

    def __init__(self, client: httpx.Client, prompt_tokens: int, tokens: int) -> None:
        """`prompt_tokens` and `tokens` are the lengths of the prompt and of the answer."""
        super().__init__()
        self._client = client
        self._body = {
            "model": client.get("/v1/models").json()["data"][0]["id"],
            # ids that any vocabulary has, behind the usual special ids
            "prompt": [random.randrange(3, 256) for _ in range(prompt_tokens)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "logit_bias": {str(LETTER): 100},
            "stream": True,
        }
        self.began_s = time.perf_counter()
        self.arrivals_s: list[float] = []  #: of the pieces, by `perf_counter`
        self.start()

    def run(self) -> None:
        """Reads the stream to its end. Raises what httpx raises, in the thread."""
        with self._client.stream("POST", "/v1/completions", json=self._body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.arrivals_s.append(time.perf_counter())

    def gaps_ms(self, begin_s: float, end_s: float) -> list[float]:
        """Returns the milliseconds from the previous token to each one that came in this time."""
        return [
            (arrival - previous) * 1e3
            for previous, arrival in itertools.pairwise(self.arrivals_s)
            if begin_s <= arrival <= end_s
        ]


def measure(url: str, rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of all rounds by the names that the module's docstring explains."""
    alone: list[float] = []
    beside: list[float] = []
    hand_overs: list[float] = []
    ttfts: list[float] = []
    with httpx.Client(base_url=url, timeout=120, trust_env=not is_this_machine(url)) as client:
        # Warms the server. Prompts are random, so nothing of them is cached later.
        TimedStream(client, PROMPT_TOKENS, 4).join()
        for _ in range(rounds):
            first = TimedStream(client, PROMPT_TOKENS // 3, STREAM_TOKENS)
            time.sleep(LATER_S)
            second = TimedStream(client, PROMPT_TOKENS, 10)
            first.join()
            second.join()
            first_token_s = second.arrivals_s[0]
            beside += first.gaps_ms(second.began_s, first_token_s)
            alone += first.gaps_ms(0.0, second.began_s)
            alone += first.gaps_ms(second.arrivals_s[-1], float("inf"))
            hand_overs.append((second.arrivals_s[1] - first_token_s) * 1e3)
            ttfts.append((first_token_s - second.began_s) * 1e3)
    return {"alone": alone, "beside": beside, "hand-over": hand_overs, "TTFT": ttfts}


def main() -> None:
    """Prints a table of milliseconds. Arguments: the server's URL, and how many rounds."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 12
    print(f"{'MS':10} {'COUNT':>6} {'P50':>8} {'P90':>8} {'MAX':>8}")
    for name, values in measure(url, rounds).items():
        p50, p90, largest = np.percentile(values or [float("nan")], (50, 90, 100))
        print(f"{name:10} {len(values):6} {p50:8.1f} {p90:8.1f} {largest:8.1f}")


if __name__ == "__main__":
    main()
