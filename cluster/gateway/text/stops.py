"""Stop strings (pure): text passes through a filter as soon as it cannot be part of a stop."""

from __future__ import annotations


class StopStringFilter:
    """Watches the text of one answer for the first of several stop strings.

    The first one is the one that ends first. Of several that end at the same character the longest
    counts. No character of that stop string comes out, unless `keep_stop` is True: then it is the
    end of the text. Text that may still become a stop string is held back.
    """

    def __init__(self, stops: tuple[str, ...], keep_stop: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._keep_stop = keep_stop
        self._longest_stop_chars = max(map(len, stops), default=0)
        self._held_text = ""  #: The end of the text so far, with which a stop string may begin.
        #: So many of its first characters were passed by: no stop string may end among them.
        self._passed_chars = 0
        #: The stop string that ended the answer; None until it came.
        self.found_stop: str | None = None

    def feed(self, text: str) -> str:
        """Take the next text; return what may come out of it and of what was held back."""
        if not self._stops:
            return text
        if self.found_stop is not None:
            return ""
        text = self._held_text + text
        first_stop = self._find_first_stop(text)
        if first_stop is None:
            return self._release(text)
        start, stop = first_stop
        self.found_stop = stop
        self._held_text = ""
        end = start + len(stop) if self._keep_stop else start
        return text[:end]

    def pass_by(self, text: str) -> str:
        """Take the next text, in which no stop string may end; return what may come out.

        A stop string may begin in it and end in what `feed` takes.
        """
        if not self._stops or self.found_stop is not None:
            return self.feed(text)
        text = self._held_text + text
        self._passed_chars = len(text)
        return self._release(text)

    def _release(self, text: str) -> str:
        """Hold back the end of a text that may become a stop string; return the rest."""
        released_chars = len(text) - self._possible_stop_chars(text)
        self._held_text = text[released_chars:]
        self._passed_chars = max(0, self._passed_chars - released_chars)
        return text[:released_chars]

    def flush(self) -> str:
        """Return what was held back and, as the answer has ended, became no stop string."""
        held_text = self._held_text
        self._held_text = ""
        return held_text

    def _find_first_stop(self, text: str) -> tuple[int, str] | None:
        """Return where the stop string that ends first starts, and the stop string."""
        first_end = len(text) + 1
        first_stop: str | None = None
        for stop in self._stops:  # the longest first, so that it wins among equal ends
            start = text.find(stop, max(0, self._passed_chars - len(stop) + 1))
            if start >= 0 and start + len(stop) < first_end:
                first_end = start + len(stop)
                first_stop = stop
        if first_stop is None:
            return None
        return first_end - len(first_stop), first_stop

    def _possible_stop_chars(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        # A whole stop string would have been found, so one character less is the most to hold.
        for size in range(min(self._longest_stop_chars - 1, len(text)), 0, -1):
            end = text[len(text) - size :]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
