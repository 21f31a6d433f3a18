"""Chat messages as a template should see them: plain copies, image parts reduced to their type, and the media list.

Engines hand the template ``{"type": "image"}`` for an image part, and tool-call arguments as objects. A part whose
treatment differs between engines is kept and noted as a defect: the text before it can still be planned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from planner.errors import BadRequest, PlanningError, Reason, shown
from planner.identity import is_image

_VIDEO = frozenset({"video", "video_url"})
_AUDIO = frozenset({"audio", "audio_url", "input_audio"})
_OVERRIDING = (
    "min_pixels", "max_pixels", "resized_height", "resized_width", "max_dynamic_patch", "min_dynamic_patch", "size",
    "patch_size", "merge_size", "min_image_tokens", "max_image_tokens", "mm_processor_kwargs", "media_io_kwargs",
)  # fmt: skip
_MAX_DEPTH = 64
_RESERVED = frozenset({
    "conversation", "tools", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "messages",
})  # fmt: skip
"""Names that would change how the template is called, not what it sees."""


class Part(msgspec.Struct, frozen=True):
    """One piece of content: ``kind`` text, image, video, audio or other, and what the template gets for it."""

    kind: str
    value: Any


class Message(msgspec.Struct, frozen=True):
    """``fields`` without content; ``content`` text, None, or parts."""

    fields: dict[str, Any]
    content: str | tuple[Part, ...] | None


class Messages(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, the template's options, and its image parts as (message index, the request's own part)."""

    entries: tuple[Message, ...]
    tools: list[Any] | None
    options: dict[str, Any]
    images: tuple[tuple[int, Mapping[str, Any]], ...]
    defect: PlanningError | None


def read_messages(request: Mapping[str, Any]) -> Messages:
    """Read ``messages``, ``tools`` and template options. Raises :class:`BadRequest`."""
    given = request["messages"]
    if not isinstance(given, list | tuple) or not given:
        raise BadRequest(Reason.BAD_REQUEST, f"messages = {shown(given)}: expected a list of at least one")
    images: list[tuple[int, Mapping[str, Any]]] = []
    defects: list[PlanningError] = []
    entries = tuple(_message(message, i, images, defects) for i, message in enumerate(given))
    tools = request.get("tools")
    if tools is not None and not isinstance(tools, list | tuple):
        raise BadRequest(Reason.BAD_REQUEST, f"tools = {shown(tools)}: expected a list")
    return Messages(
        entries=entries, tools=plain(tools) or None, options=_options(request), images=tuple(images),
        defect=defects[0] if defects else None,
    )  # fmt: skip


def _options(request: Mapping[str, Any]) -> dict[str, Any]:
    """What engines pass to the template beside messages and tools."""
    given = request.get("chat_template_kwargs")
    if given is not None and not isinstance(given, Mapping):
        raise BadRequest(Reason.BAD_REQUEST, f"chat_template_kwargs = {shown(given)}: expected an object")
    options: dict[str, Any] = plain(given or {})
    if _RESERVED & options.keys():
        raise BadRequest(Reason.PROMPT_ALTERED, f"chat_template_kwargs sets {sorted(_RESERVED & options.keys())[0]}")
    for name in ("reasoning_effort", "documents"):
        if request.get(name) is not None:
            options[name] = plain(request[name])
    continued = request.get("continue_final_message", options.get("continue_final_message"))
    opened = request.get("add_generation_prompt", options.get("add_generation_prompt"))
    options["continue_final_message"] = bool(continued)
    options["add_generation_prompt"] = True if opened is None else bool(opened)
    return options


def _message(
    message: object, index: int, images: list[tuple[int, Mapping[str, Any]]], defects: list[PlanningError]
) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest(Reason.BAD_REQUEST, f"message {index} is {shown(message)}: expected an object with a role")
    fields = {key: plain(value) for key, value in message.items() if key != "content"}
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = [_tool_call(call) for call in fields["tool_calls"]]
    content = message.get("content")
    if content is None or isinstance(content, str):
        return Message(fields, content)
    if not isinstance(content, list | tuple):
        raise BadRequest(Reason.BAD_REQUEST, f"message {index} has content {shown(content)}: expected text or parts")
    return Message(fields, tuple(_part(part, index, images, defects) for part in content))


def _part(part: object, index: int, images: list[tuple[int, Mapping[str, Any]]], defects: list[PlanningError]) -> Part:
    if isinstance(part, str):
        return Part("text", part)
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise BadRequest(
            Reason.BAD_REQUEST, f"message {index} has a part {shown(part)}: expected an object with a type"
        )
    kind = part["type"]
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise BadRequest(Reason.BAD_REQUEST, f"message {index} has a text part without text")
        return Part("text", part["text"])
    if is_image(part):
        images.append((index, part))
        defects += _overrides(part)
        return Part("image", {"type": "image"})
    return _other_part(kind, defects)


def _other_part(kind: str, defects: list[PlanningError]) -> Part:
    if kind in _VIDEO:
        defects.append(BadRequest(Reason.VIDEO, f"a part of type {shown(kind)}"))
        return Part("video", {"type": kind})
    if kind in _AUDIO:
        defects.append(BadRequest(Reason.AUDIO, f"a part of type {shown(kind)}"))
        return Part("audio", {"type": kind})
    defects.append(BadRequest(Reason.UNKNOWN_PART, f"a part of type {shown(kind)}"))
    return Part("other", {"type": kind})


def _overrides(part: Mapping[str, Any]) -> list[PlanningError]:
    """Per-image settings, on the part or beside its URL."""
    inner = part.get("image_url")
    fields = {**inner, **part} if isinstance(inner, Mapping) else part
    found = [name for name in _OVERRIDING if fields.get(name) is not None]
    return [BadRequest(Reason.REQUEST_OVERRIDE, f"an image part sets {found[0]}")] if found else []


def _tool_call(call: Any) -> Any:
    """Arguments as an object: the wire has them as JSON text, templates want the object, engines parse it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def plain(value: Any, depth: int = 0) -> Any:
    """A deep copy of JSON-like data. Raises :class:`BadRequest` for anything else, or for too deep a nesting."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if depth >= _MAX_DEPTH:
        raise BadRequest(Reason.BAD_REQUEST, f"values are nested more than {_MAX_DEPTH} deep")
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, depth + 1) for entry in value]
    raise BadRequest(Reason.BAD_REQUEST, f"{type(value).__name__} where plain JSON values are expected")
