"""Stop strings (pure): text goes in as it comes, and out as soon as it cannot become a stop."""

from __future__ import annotations


class Stops:
    """Watches one answer for the first of some strings. `found`: which one it was, once it came.

    Of several that end at the same character the longest is found. No character of a stop string
    comes out, unless `keep`.
    """

    def __init__(self, stops: tuple[str, ...], keep: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._keep = keep
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """What may be told of `text` and of what was held back before."""
        if not self._stops or self.found is not None:
            return text if self.found is None else ""
        whole = self._held + text
        hit = self._first(whole)
        if hit is not None:
            start, self.found = hit
            self._held = ""
            return whole[: start + (len(self.found) if self._keep else 0)]
        keep = self._prefix(whole)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """What was held back and became no stop."""
        held, self._held = self._held, ""
        return held

    def _first(self, whole: str) -> tuple[int, str] | None:
        """The stop that ends first, and where it starts."""
        hits = [(whole.find(stop) + len(stop), stop) for stop in self._stops if stop in whole]
        if not hits:
            return None
        end = min(end for end, _ in hits)
        stop = next(stop for at, stop in hits if at == end)  # the longest, as they are sorted
        return end - len(stop), stop

    def _prefix(self, whole: str) -> int:
        """Length of the longest end of `whole` that begins a stop."""
        for size in range(min(self._longest - 1, len(whole)), 0, -1):
            end = whole[len(whole) - size :]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
