"""Gaps of one stream while another's prompt is computed, on a cluster that does nothing else.

    python loadtests/beside.py [URL [ROUNDS]]

Each round: a stream of 60 tokens, and 1.2 s later a prompt of 900 ids. Milliseconds between the
tokens of the first one while the second prompt is computed (`beside`), and else (`alone`); the gap
between the second's first two tokens (`hand-over`), and its TTFT. As the client sees it.
"""

from __future__ import annotations

import random
import sys
import threading
import time

import httpx

PROMPT, LATER_S, TOKENS = 900, 1.2, 60
LETTER = 100  #: an id that is always text of its own, and so always a chunk


class Stream(threading.Thread):
    def __init__(self, client: httpx.Client, prompt: int, tokens: int) -> None:
        super().__init__()
        self._client = client
        self._body = {
            "model": client.get("/v1/models").json()["data"][0]["id"],
            "prompt": [random.randrange(3, 256) for _ in range(prompt)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "logit_bias": {str(LETTER): 100},
            "stream": True,
        }
        self.began = time.perf_counter()
        self.at: list[float] = []
        self.start()

    def run(self) -> None:
        with self._client.stream("POST", "/v1/completions", json=self._body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.at.append(time.perf_counter())

    def gaps(self, begins: float, ends: float) -> list[float]:
        """Of tokens that came in that time."""
        pairs = zip(self.at, self.at[1:], strict=False)
        return [(b - a) * 1e3 for a, b in pairs if begins <= b <= ends]


def measure(url: str, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"alone": [], "beside": [], "hand-over": [], "TTFT": []}
    with httpx.Client(base_url=url, timeout=120) as client:
        Stream(client, PROMPT, 4).join()  # warm
        for _ in range(rounds):
            first = Stream(client, PROMPT // 3, TOKENS)
            time.sleep(LATER_S)
            second = Stream(client, PROMPT, 10)
            first.join()
            second.join()
            found["beside"] += first.gaps(second.began, second.at[0])
            found["alone"] += first.gaps(0, second.began) + first.gaps(second.at[-1], float("inf"))
            found["hand-over"].append((second.at[1] - second.at[0]) * 1e3)
            found["TTFT"].append((second.at[0] - second.began) * 1e3)
    return found


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    found = measure(url, int(sys.argv[2]) if len(sys.argv) > 2 else 12)
    print(f"{'MS':10} {'COUNT':>6} {'P50':>8} {'P90':>8} {'MAX':>8}")
    for name, values in found.items():
        each = sorted(values) or [float("nan")]
        p50, p90 = (each[int(len(each) * share)] for share in (0.5, 0.9))
        print(f"{name:10} {len(values):6} {p50:8.1f} {p90:8.1f} {each[-1]:8.1f}")


if __name__ == "__main__":
    main()
