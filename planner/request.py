"""A request body in any of its known shapes, as one value: the prompt, its images in the order of the media list, and
what already speaks against an exact plan.

Shapes: OpenAI chat completions (``messages``), completions (``prompt``: text or ids), SGLang ``/generate`` (``text`` or
``input_ids`` with ``image_data``), vLLM token prompts (``prompt_token_ids`` with ``multi_modal_data``). Everything that
goes on from here is a copy of plain values; the request itself is only read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from planner.errors import BadRequest, PlanningError, Reason, shown
from planner.identity import Identity, from_caller, read_mm_hash, read_uuid
from planner.images import source_of
from planner.messages import Messages, read_messages

_ALTERING = (
    "truncate_prompt_tokens", "prompt_embeds", "input_embeds", "chat_template",
)  # fmt: skip
_OVERRIDES = ("mm_processor_kwargs", "media_io_kwargs", "mm_process_config", "images_kwargs")
_OTHER_MEDIA = {"video_data": Reason.VIDEO, "audio_data": Reason.AUDIO}
Engine = Literal["vllm", "sglang"]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Whose cache the prompt is looked up in: model, adapter, salt."""

    model: str
    lora_name: str | None = None
    cache_salt: str | None = None


class ImagePart(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the media list; ``message`` is the index of the message it stands in."""

    source: Any
    message: int = 0
    identity: Identity | None = None


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of ``messages``, ``text`` and ``token_ids``; ``defect`` is what rules out exact images."""

    messages: Messages | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    images: tuple[ImagePart, ...] = ()
    defect: PlanningError | None = None
    engine: Engine | None = None
    add_special_tokens: bool = False


def read_head(request: object, model: str, loras: frozenset[str]) -> Head:
    """Model, adapter and salt. Raises :class:`BadRequest` where they cannot be told: nothing may be scored then."""
    if not isinstance(request, Mapping):
        raise BadRequest(Reason.BAD_REQUEST, f"{type(request).__name__}, expected an object")
    named = _text(request, "model")
    adapters = [_text(request, name) for name in ("lora", "lora_name", "lora_path")]
    lora = next((name for name in adapters if name), None)
    if named in loras:
        named, lora = None, lora or named
    return Head(model=named or model, lora_name=lora, cache_salt=_text(request, "cache_salt"))


def _text(request: Mapping[str, Any], name: str) -> str | None:
    value = request.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise BadRequest(Reason.BAD_REQUEST, f"{name} = {shown(value)}: expected a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(Reason.BAD_REQUEST, f"{name}: {error.reason}") from None
    return value


def read_prompt(request: Mapping[str, Any]) -> Prompt:
    """The prompt and its media. Raises :class:`BadRequest` where there is no single prompt to plan."""
    for name in _ALTERING:
        if request.get(name) is not None:
            raise BadRequest(Reason.PROMPT_ALTERED, f"{name} = {shown(request[name])}")
    if request.get("messages") is not None:
        prompt = _chat(request)
    elif request.get("input_ids") is not None or request.get("text") is not None:
        prompt = _generate(request)
    else:
        prompt = _completion(request)
    defect = prompt.defect or _foreign_media(request) or (_override(request) if prompt.images else None)
    return msgspec.structs.replace(prompt, defect=defect)


def _chat(request: Mapping[str, Any]) -> Prompt:
    messages = read_messages(request)
    prompt = Prompt(
        messages=messages, defect=messages.defect, add_special_tokens=bool(request.get("add_special_tokens"))
    )
    sources = [source_of(part) for _, part in messages.images]
    places = [message for message, _ in messages.images]
    uuids = [part.get("uuid") for _, part in messages.images]
    return _with_images(prompt, request, sources, places, uuids)


def _generate(request: Mapping[str, Any]) -> Prompt:
    ids, text = request.get("input_ids"), request.get("text")
    prompt = _ids_or_text(text if ids is None else ids)
    prompt = msgspec.structs.replace(prompt, engine="sglang", add_special_tokens=True)
    sources = _media_list(request.get("image_data"))
    return _with_images(prompt, request, sources, [0] * len(sources), [None] * len(sources))


def _completion(request: Mapping[str, Any]) -> Prompt:
    given = request.get("prompt_token_ids")
    prompt = _ids_or_text(request.get("prompt") if given is None else given)
    data, uuids = request.get("multi_modal_data"), request.get("multi_modal_uuids")
    media, names = _modality(data, "image"), _modality(uuids, "image")
    sources = _media_list(media)
    listed = _media_list(names) if names is not None else [None] * len(sources)
    prompt = msgspec.structs.replace(
        prompt, add_special_tokens=request.get("add_special_tokens") is not False, defect=_other_modality(data)
    )
    return _with_images(prompt, request, sources, [0] * len(sources), listed)


def _ids_or_text(value: object) -> Prompt:
    """A prompt as text or ids; a list of one prompt is that prompt."""
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], str | list | tuple):
        value = value[0]
    if isinstance(value, str):
        return Prompt(text=value)
    if not isinstance(value, list | tuple):
        raise BadRequest(Reason.BAD_REQUEST, f"prompt = {shown(value)}: expected messages, text or token ids")
    if any(isinstance(entry, str | list | tuple) for entry in value):
        raise BadRequest(Reason.SEVERAL_PROMPTS, f"{len(value)} prompts")
    return Prompt(token_ids=_token_ids(value))


def _token_ids(value: Sequence[Any]) -> list[int]:
    ids = list(value)
    if set(map(type, ids)) - {int} or not 0 <= min(ids, default=0) <= max(ids, default=0) < 1 << 32:
        raise BadRequest(Reason.BAD_TOKEN_IDS, "expected integers in 0..2^32-1")
    return ids


def _media_list(value: object) -> list[Any]:
    """``image_data`` and friends: one item or a list of them; an object names its image inside."""
    if value is None:
        return []
    entries = list(value) if isinstance(value, list | tuple) else [value]
    return [source_of(entry) if isinstance(entry, Mapping) else entry for entry in entries]


def _modality(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else None


def _other_modality(data: object) -> PlanningError | None:
    if data is None:
        return None
    if not isinstance(data, Mapping):
        return BadRequest(Reason.BAD_REQUEST, f"multi_modal_data = {shown(data)}: expected an object")
    others = [str(name) for name, value in data.items() if name != "image" and value]
    reasons = {"video": Reason.VIDEO, "audio": Reason.AUDIO}
    return (
        BadRequest(reasons.get(others[0], Reason.UNKNOWN_PART), f"multi_modal_data: {shown(others[0])}")
        if others
        else None
    )


def _foreign_media(request: Mapping[str, Any]) -> PlanningError | None:
    for name, reason in _OTHER_MEDIA.items():
        if request.get(name):
            return BadRequest(reason, f"{name} is set")
    return None


def _override(request: Mapping[str, Any]) -> PlanningError | None:
    """Image settings of one request change counts, and vLLM hashes them into the identity."""
    for name in _OVERRIDES:
        if request.get(name):
            return BadRequest(Reason.REQUEST_OVERRIDE, f"{name} = {shown(str(request[name]))}")
    return None


def _with_images(
    prompt: Prompt, request: Mapping[str, Any], sources: list[Any], places: list[int], uuids: list[Any]
) -> Prompt:
    if not sources and not uuids:
        return prompt
    identities: list[Identity | None] = [None] * len(sources)
    defect = prompt.defect
    try:
        identities = _identities(uuids, request.get("mm_hashes"), len(sources))
    except PlanningError as error:
        defect = defect or error
    parts = (
        ImagePart(source=source, message=place, identity=identity)
        for source, place, identity in zip(sources, places, identities, strict=True)
    )
    return msgspec.structs.replace(prompt, images=tuple(parts), defect=defect)


def _identities(uuids: list[Any], hashes: object, images: int) -> list[Identity | None]:
    if hashes is None:
        hashes = [None] * images
    elif isinstance(hashes, str):
        hashes = [hashes]
    if not isinstance(hashes, list | tuple) or len(hashes) != images or len(uuids) != images:
        raise BadRequest(Reason.IDENTITY_COUNT, f"mm_hashes or uuids do not name {images} images")
    named = [read_uuid(uuid) for uuid in uuids]
    hashed = (
        [read_mm_hash(value) for value in hashes] if any(value is not None for value in hashes) else [None] * images
    )
    return [from_caller(uuid, hash64) for uuid, hash64 in zip(named, hashed, strict=True)]
