"""Messages to text to tokens, by the checkpoint's own template and tokenizer through transformers.

Beside the text, a render says where each content part came to stand. It is found by rendering once more with a
private-use character before each part: if taking the marks out again gives the plain text, their places are true.
That is also how images that the template puts in another order than the request are noticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import msgspec

from planner.errors import PlanningError, PromptError, Reason
from planner.extras import transformers
from planner.messages import Message, Messages, Part

_MARK_BASE = 0xF0000
_MARK_COUNT = 0xFFFD
_MARKS = re.compile(f"[{chr(_MARK_BASE)}-{chr(_MARK_BASE + _MARK_COUNT)}]")
_PROBE = "kvd probe"
_LOOK_AHEAD = 16


class Place(msgspec.Struct, frozen=True):
    """Where a content part begins in the rendered text, in characters."""

    char: int
    message: int
    kind: str


class Rendered(msgspec.Struct, frozen=True):
    """A prompt's text; ``places`` as far as they are known; ``in_order``: are media in the request's order, None for
    not known."""

    text: str
    places: tuple[Place, ...] = ()
    in_order: bool | None = None


class Tokenized(msgspec.Struct, frozen=True):
    """Token ids, and which token holds a character (None where no token does, or the tokenizer cannot tell)."""

    ids: list[int]
    token_at: Callable[[int], int | None]


class Codec:
    """A checkpoint's template and tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._shapes: dict[bool, bool] = {}

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Load from a local directory, offline, running no code of the checkpoint's. Raises :class:`PromptError`."""
        auto = transformers().AutoTokenizer
        try:
            return cls(auto.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False))
        except Exception as error:
            text = f"{directory}: {type(error).__name__}: {error!s:.200}"
            raise PromptError(Reason.NO_TOKENIZER, text) from None

    def encode(self, text: str) -> list[int]:
        """Token ids with special tokens read as such and none added."""
        return self.tokenize(text).ids

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> Tokenized:
        """Raises :class:`PromptError`."""
        try:
            encoding = self._tokenizer(
                text, add_special_tokens=add_special_tokens, return_attention_mask=False, return_token_type_ids=False,
                verbose=False,
            )  # fmt: skip
            ids = encoding["input_ids"]
        except Exception as error:
            raise PromptError(Reason.TOKENIZE_FAILED, f"{type(error).__name__}: {error!s:.120}") from None
        return Tokenized(ids, lambda char: _token_at(encoding, char, len(text)))

    def render(self, messages: Messages) -> Rendered:
        """The conversation as text. Raises :class:`PromptError`."""
        text = self._apply(self._conversation(messages.entries), messages)
        for marked in (("text", "image", "video", "audio", "other"), ("image", "video", "audio", "other")):
            places = self._places(messages, text, marked)
            if places is not None:
                return Rendered(text, *places)
        return Rendered(text)

    def render_until(self, messages: Messages, message: int, part: int) -> str:
        """The conversation cut before a part, nothing opened after it. Raises :class:`PromptError`."""
        last = messages.entries[message]
        content = last.content[:part] if isinstance(last.content, tuple) else last.content
        entries = (*messages.entries[:message], Message(last.fields, content))
        options = {**messages.options, "add_generation_prompt": False, "continue_final_message": False}
        return self._apply(self._conversation(entries), msgspec.structs.replace(messages, options=options))

    def _apply(self, conversation: list[dict[str, Any]], messages: Messages) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                conversation, tools=messages.tools, tokenize=False, **messages.options
            )
        except Exception as error:  # a template is foreign code and raises what it likes
            raise PromptError(Reason.RENDER_FAILED, f"{type(error).__name__}: {error!s:.120}") from None
        return str(rendered)

    def _conversation(self, entries: tuple[Message, ...]) -> list[dict[str, Any]]:
        if not self._tokenizer.chat_template:
            raise PromptError(Reason.NO_TEMPLATE)
        return [{**entry.fields, "content": self._content(entry.content)} for entry in entries]

    def _content(self, content: str | tuple[Part, ...] | None) -> Any:
        """Content in the shape the template reads, as engines choose it: parts, or text where there is one text."""
        if isinstance(content, str) and self._reads(as_parts=True) and not self._reads(as_parts=False):
            content = (Part("text", content),)
        if not isinstance(content, tuple):
            return content
        if self._reads(as_parts=True):
            return [{"type": "text", "text": part.value} if part.kind == "text" else part.value for part in content]
        if len(content) > 1 or any(part.kind != "text" for part in content):
            raise PromptError(Reason.TEMPLATE_WITHOUT_PARTS)
        return content[0].value if content else ""

    def _reads(self, *, as_parts: bool) -> bool:
        """Does the template render content of this shape? Found out once, with a word that it must print unquoted."""
        if as_parts not in self._shapes:
            self._shapes[as_parts] = self._try([{"type": "text", "text": _PROBE}] if as_parts else _PROBE)
        return self._shapes[as_parts]

    def _try(self, content: Any) -> bool:
        try:
            shown = self._tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        except Exception:
            return False
        return _PROBE in shown and f"'{_PROBE}'" not in shown and f'"{_PROBE}"' not in shown

    def _places(
        self, messages: Messages, text: str, kinds: tuple[str, ...]
    ) -> tuple[tuple[Place, ...], bool | None] | None:
        """Places and order of the marked kinds; None where marks cannot be put or do not come out clean."""
        named: list[tuple[str, int]] = []
        entries = tuple(_marked(entry, i, kinds, named) for i, entry in enumerate(messages.entries))
        if len(named) > _MARK_COUNT or _MARKS.search(text):
            return None
        try:
            marked = self._apply(self._conversation(entries), messages)
        except PlanningError:
            return None
        if _MARKS.sub("", marked) != text:
            return None
        found = [(ord(mark[0]) - _MARK_BASE, mark.start() - i) for i, mark in enumerate(_MARKS.finditer(marked))]
        places = tuple(Place(char, named[mark][1], named[mark][0]) for mark, char in found)
        return places, _in_order([mark for mark, _ in found], named)


def _marked(entry: Message, index: int, kinds: tuple[str, ...], named: list[tuple[str, int]]) -> Message:
    if isinstance(entry.content, str) and "text" in kinds:
        return Message(entry.fields, _mark_text(entry.content, index, named))
    if not isinstance(entry.content, tuple):
        return entry
    return Message(entry.fields, tuple(_mark_parts(entry.content, index, kinds, named)))


def _mark_parts(
    parts: tuple[Part, ...], index: int, kinds: tuple[str, ...], named: list[tuple[str, int]]
) -> Iterator[Part]:
    for part in parts:
        if part.kind == "text":
            yield Part("text", _mark_text(part.value, index, named)) if "text" in kinds else part
            continue
        yield Part("text", chr(_MARK_BASE + len(named)))
        named.append((part.kind, index))
        yield part


def _mark_text(text: str, index: int, named: list[tuple[str, int]]) -> str:
    """The mark goes behind leading white space, which templates like to strip."""
    body = text.lstrip()
    if not body:
        return text
    named.append(("text", index))
    return text[: len(text) - len(body)] + chr(_MARK_BASE + len(named) - 1) + body


def _in_order(marks: list[int], named: list[tuple[str, int]]) -> bool | None:
    media = [mark for mark in marks if named[mark][0] != "text"]
    if len(media) != sum(kind != "text" for kind, _ in named):
        return None
    return media == sorted(media)


def _token_at(encoding: Any, char: int, length: int) -> int | None:
    """The token of a character; of the next one that has a token where this one was dropped (a stripped space)."""
    if not getattr(encoding, "is_fast", False):
        return None
    for at in range(char, min(char + _LOOK_AHEAD, length)):
        token = encoding.char_to_token(at)
        if token is not None:
            return int(token)
    return None


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two sequences share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
