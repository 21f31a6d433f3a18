"""A recorded engine request back as a request body: its images made again, its known identities put on their parts.

Recordings hold how an image was made instead of its bytes: pixel (x, y) of a ``w`` × ``h`` picture with ``seed`` s is
RGB ``(7x + 31s, 11y + 17s, xy + 101s)``, each modulo 256, saved by Pillow in ``fmt`` with default options.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from planner.extras import require


def request_of(recorded: Mapping[str, Any], *, base_model: str = "tiny") -> dict[str, Any] | None:
    """The body of one line of a ``TAG.requests.jsonl``; None where the line asked for no prompt (a reset, a flush).

    A ``model`` other than ``base_model`` was an adapter's name and becomes ``lora``. Identifiers that the engine
    reported become each part's ``uuid``, as if the caller had known them.
    """
    request = recorded.get("request")
    if isinstance(request, list):  # /tokenize and /render lines hold the messages alone
        request = {"model": base_model, "messages": request}
    if not isinstance(request, Mapping) or not _PROMPTS & request.keys():
        return None
    body = {key: value for key, value in request.items() if key not in ("messages", "image_data")}
    if body.get("model", base_model) != base_model:
        body |= {"lora": body["model"], "model": base_model}
    if "messages" in request:
        identifiers = iter([image.get("identifier") for image in recorded.get("images") or ()])
        body["messages"] = [_message(message, identifiers) for message in request["messages"]]
    if request.get("image_data"):
        body["image_data"] = [picture(image) for image in request["image_data"]]
    return body


_PROMPTS = frozenset({"messages", "prompt", "prompt_token_ids", "text", "input_ids"})


def _message(message: Mapping[str, Any], identifiers: Iterator[str | None]) -> dict[str, Any]:
    if not isinstance(message.get("content"), list):
        return dict(message)
    return {**message, "content": [_part(part, identifiers) for part in message["content"]]}


def _part(part: Mapping[str, Any], identifiers: Iterator[str | None]) -> dict[str, Any]:
    made = part.get("made_by")
    if not isinstance(made, Mapping) or "video_frames" in made:
        return {key: value for key, value in part.items() if key != "made_by"}
    identifier = next(identifiers, None) or made.get("uuid")
    body = {"type": part["type"], "image_url": {"url": picture(made)}}
    return body | ({"uuid": identifier} if identifier else {})


def picture(made: Mapping[str, Any]) -> bytes:
    """The encoded image that ``{"w", "h", "seed", "fmt"}`` describes."""
    return _encode(made["w"], made["h"], made["seed"], made["fmt"])


@lru_cache(maxsize=64)
def _encode(width: int, height: int, seed: int, kind: str) -> bytes:
    red = bytes((7 * x + 31 * seed) & 255 for x in range(width))
    rows = bytearray()
    for y in range(height):
        row = bytearray(3 * width)
        row[0::3] = red
        row[1::3] = bytes([(11 * y + 17 * seed) & 255]) * width
        row[2::3] = bytes((x * y + 101 * seed) & 255 for x in range(width))
        rows += row
    file = io.BytesIO()
    require("PIL.Image").frombytes("RGB", (width, height), bytes(rows)).save(file, kind)
    return file.getvalue()
