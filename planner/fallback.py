"""What is still true of a prompt that cannot be planned exactly: the text before its first media item."""

from __future__ import annotations

from planner.errors import PlanningError, Reason
from planner.families import ImageFamily
from planner.messages import Message, Messages
from planner.prompt import Codec, common_prefix
from planner.reading import Reading
from planner.request import Prompt

_OPENING = ("<|begin_of_image|>", "<|image|>", "<|begin_of_video|>", "<|video|>", "<|begin_of_audio|>")


def text_tokens(
    prompt: Prompt, reading: Reading, codec: Codec | PlanningError, family: ImageFamily | PlanningError,
    error: PlanningError,
) -> int:  # fmt: skip
    """How many leading tokens are surely text that the engine will hold under the same keys."""
    openings = _openings(codec, family)
    places = [reading.tokens.index(token) for token in openings if token in reading.tokens]
    if error.reason is Reason.NUL_IN_PROMPT and reading.text:
        places.append(reading.token_at(reading.text.index("\0")) or 0)
    if not places or _has_unknown_part(prompt):
        places.append(_until_first_part(prompt, reading, codec, known=bool(openings)))
    return min(places)


def _has_unknown_part(prompt: Prompt) -> bool:
    """A part that the template may drop and the engine may not: no token shows its place."""
    entries = prompt.messages.entries if prompt.messages else ()
    return any(part.kind == "other" for entry in entries if isinstance(entry.content, tuple) for part in entry.content)


def _openings(codec: Codec | PlanningError, family: ImageFamily | PlanningError) -> set[int]:
    """Ids that begin media: the family's, and those the tokenizer knows by GLM's names where the family failed."""
    found = set() if isinstance(family, PlanningError) else set(family.placeholder.opening_ids)
    if not isinstance(codec, PlanningError):
        singles = [codec.encode(name) for name in _OPENING]
        found |= {ids[0] for ids in singles if len(ids) == 1}
    return found


def _until_first_part(prompt: Prompt, reading: Reading, codec: Codec | PlanningError, *, known: bool) -> int:
    """Where no token shows the place: what the whole prompt shares with the conversation cut before its first part
    that is not text. For prompts without messages, all of it if media tokens are known and absent, else nothing."""
    if prompt.messages is None or isinstance(codec, PlanningError):
        return len(reading.tokens) if known else 0
    place = _first_part(prompt.messages)
    if place is None:
        return len(reading.tokens)
    try:
        cut = codec.encode(codec.render_until(prompt.messages, *place))
    except PlanningError:
        return 0
    return common_prefix(reading.tokens, cut)


def _first_part(messages: Messages) -> tuple[int, int] | None:
    for i, entry in enumerate(messages.entries):
        for j, part in enumerate(entry.content if isinstance(entry.content, tuple) else ()):
            if part.kind != "text":
                return i, j
    return None


def text_of(prompt: Prompt, codec: Codec | PlanningError) -> str:
    """Some text for approximate matching: rendered where that works, else the messages' own texts in order."""
    if prompt.messages is None:
        return _encodable(prompt.text or "")
    try:
        if not isinstance(codec, PlanningError):
            return _encodable(codec.render(prompt.messages).text)
    except PlanningError:
        pass
    return _encodable("\n".join(_said(entry) for entry in prompt.messages.entries))


def _said(entry: Message) -> str:
    content = entry.content
    parts = [content or ""] if not isinstance(content, tuple) else [p.value for p in content if p.kind == "text"]
    return "\n".join([f"{entry.fields['role']}:", *parts])


def _encodable(text: str) -> str:
    """Lone surrogates cannot travel as UTF-8."""
    return text.encode("utf-8", "replace").decode()
