"""From token ids to text, incrementally: characters that span tokens come out whole.

There are two ways, with the same text. Byte-level tokenizers have a table of what each id adds, so
a token costs one look-up. All others decode a few tokens again for each new one. (These differ behind
seven ids or more without any text, which no known tokenizer of the second kind has beside its special
tokens: a character of several bytes that comes then is lost.)
"""

from __future__ import annotations

import codecs

from tokenizers import Tokenizer

#: So many held ids come out even if their text ends inside a character; fewer wait for the rest. A
#: token may be a single byte, and a character has at most four: so the three bytes of a character
#: that broke off may wait together with the four of a whole one behind it.
INCOMPLETE_IDS_MAX = 8
REPLACEMENT_CHARACTER = "\ufffd"  #: What libraries decode bytes to that are no whole character.


class PieceDetokenizer:
    """Turns the ids of one answer into text by a table: `pieces[token_id]`.

    A piece is text, or bytes where a token begins or ends inside of a character.
    """

    __slots__ = ("_decoder", "_pieces", "inside_character")

    def __init__(self, pieces: list[str | bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        #: True while the bytes so far end inside a character. If the last token also completed text
        #: in front of that character, that text is out already, and the rest of the token is not.
        self.inside_character = False

    def feed(self, token_ids: list[int]) -> str:
        """Return the text that is complete with these tokens. Unknown ids add nothing."""
        if len(token_ids) == 1:
            return self._feed_token(token_ids[0])
        return "".join([self._feed_token(token_id) for token_id in token_ids])

    def _feed_token(self, token_id: int) -> str:
        """Return the text that is complete with this token: its piece, in almost all cases."""
        try:
            piece = self._pieces[token_id]
        except IndexError:
            return ""
        if isinstance(piece, str):
            if not self.inside_character or not piece:
                return piece
            # Text behind an incomplete character: the decoder must see it, to replace that one.
            piece = piece.encode()
        text = self._decoder.decode(piece)
        self.inside_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return what is left at the end: an incomplete character comes out as U+FFFD."""
        self.inside_character = False
        return self._decoder.decode(b"", final=True)


class LibraryDetokenizer:
    """Turns the ids of one answer into text by the tokenizer's own `decode`, token by token.

    A token's text may depend on the token before, so the ids of the last text are decoded again as
    context. `hidden_ids` are special tokens that are no text.
    """

    #: As of `PieceDetokenizer`, but never True, even while ids are held back: here the text of a
    #: token comes out whole or not at all.
    inside_character = False

    def __init__(self, tokenizer: Tokenizer, hidden_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        #: The ids of the last text that came out, as context, then those that are held back.
        self._token_ids: list[int] = []
        self._context_ids = 0  #: How many of `_token_ids` are context.
        self._context_text = ""  #: What the context decodes to; new text is what comes behind.

    def feed(self, token_ids: list[int]) -> str:
        """Return the text that is complete with these tokens. Hidden ids add nothing."""
        return "".join([self._feed_token(token_id) for token_id in token_ids])

    def _feed_token(self, token_id: int) -> str:
        """Return the text that is complete with this token; keep its ids as the next context."""
        if token_id in self._hidden_ids:
            return ""
        self._token_ids.append(token_id)
        text = self._decode()
        if len(text) < len(self._context_text):
            # Stray bytes, each of which was a replacement character, became one character.
            self._context_text = text
        held_ids = len(self._token_ids) - self._context_ids
        incomplete = text.endswith(REPLACEMENT_CHARACTER) and held_ids < INCOMPLETE_IDS_MAX
        if incomplete or len(text) <= len(self._context_text):
            if held_ids > INCOMPLETE_IDS_MAX:  # ids without text: they would be decoded ever again
                del self._token_ids[self._context_ids]
            return ""
        new_text = text[len(self._context_text) :]
        self._token_ids = self._token_ids[self._context_ids :]
        self._context_ids = held_ids
        self._context_text = self._decode()
        return new_text

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._token_ids, skip_special_tokens=False)
        return text

    def flush(self) -> str:
        """Return what is left at the end: an incomplete character comes out as U+FFFD."""
        return self._decode()[len(self._context_text) :]
