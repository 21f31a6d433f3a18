"""Why a request could not be planned exactly, as one enum, and the errors that carry it.

::

    PlanningError            has a reason and a detail; becomes a prefix or text plan, never a crash of the caller
    ├── CheckpointError      a checkpoint's metadata cannot be read, or says something no exact plan may rest on
    ├── BadRequest           the request's own shape
    ├── PromptError          template or tokenizer
    ├── ImageError           one image: its source, format, size or identity
    ├── CountError           the family has no token count for a size
    ├── LayoutError          the tokens are not what the family's placeholders look like
    └── MissingExtra         a package of ``kvd[planner]`` is not installed (also an ImportError)
"""

from __future__ import annotations

from enum import StrEnum

from protocols.errors import KvdError


class Reason(StrEnum):
    """What stood in the way. The value is stable (metrics, replies); :attr:`sentence` is for people."""

    MISSING_EXTRA = "missing_extra"
    CHECKPOINT_MISSING = "checkpoint_missing"
    REVISION_NOT_CACHED = "revision_not_cached"
    CONFIG_UNREADABLE = "config_unreadable"
    CONFIG_MISSING = "config_missing"
    CONFIG_INVALID = "config_invalid"
    CONFIG_UNSUPPORTED = "config_unsupported"
    CONFIG_CONFLICT = "config_conflict"
    MODEL_UNSUPPORTED = "model_unsupported"
    PLACEHOLDER_SPLIT = "placeholder_split"
    ENGINE_OVERRIDE = "engine_override"

    NO_TOKENIZER = "no_tokenizer"
    NO_TEMPLATE = "no_template"
    TEMPLATE_WITHOUT_PARTS = "template_without_parts"
    RENDER_FAILED = "render_failed"
    TOKENIZE_FAILED = "tokenize_failed"

    BAD_REQUEST = "bad_request"
    BAD_TOKEN_IDS = "bad_token_ids"
    SEVERAL_PROMPTS = "several_prompts"
    PROMPT_ALTERED = "prompt_altered"
    REQUEST_OVERRIDE = "request_override"
    VIDEO = "video"
    AUDIO = "audio"
    UNKNOWN_PART = "unknown_part"
    IDENTITY_INVALID = "identity_invalid"
    IDENTITY_COUNT = "identity_count"

    TOO_MANY_IMAGES = "too_many_images"
    IMAGE_MISSING = "image_missing"
    IMAGE_SOURCE = "image_source"
    IMAGE_ENCODING = "image_encoding"
    IMAGE_FILE = "image_file"
    IMAGE_TOO_LARGE = "image_too_large"
    IMAGE_FORMAT = "image_format"
    IMAGE_UNREADABLE = "image_unreadable"
    IMAGE_TRUNCATED = "image_truncated"
    IMAGE_SIZE = "image_size"
    IMAGE_ORIENTATION = "image_orientation"
    REMOTE_REFUSED = "remote_refused"
    REMOTE_FAILED = "remote_failed"

    COUNT_FAILED = "count_failed"
    COUNT_INVALID = "count_invalid"

    PLACEHOLDER_MISSING = "placeholder_missing"
    PLACEHOLDER_COUNT = "placeholder_count"
    PLACEHOLDER_ADJACENT = "placeholder_adjacent"
    PLACEHOLDER_BARE = "placeholder_bare"
    DELIMITER_STRAY = "delimiter_stray"
    VIDEO_TOKENS = "video_tokens"
    TOKEN_RANGE = "token_range"
    PROMPT_TOO_LONG = "prompt_too_long"
    NUL_IN_PROMPT = "nul_in_prompt"
    ORDER_CHANGED = "order_changed"
    ORDER_UNKNOWN = "order_unknown"
    INTERNAL = "internal"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES: dict[Reason, str] = {
    Reason.MISSING_EXTRA: "A package of the planner extra is not installed: pip install kvd[planner].",
    Reason.CHECKPOINT_MISSING: "There is no checkpoint directory at this path.",
    Reason.REVISION_NOT_CACHED: "The repository's revision is not in the local cache, and planning does not download.",
    Reason.CONFIG_UNREADABLE: "A metadata file is missing, is not JSON, or is not an object.",
    Reason.CONFIG_MISSING: "A field that decides the token count or the placeholder is not in the metadata.",
    Reason.CONFIG_INVALID: "A metadata field has a type or value that nothing can be computed from.",
    Reason.CONFIG_UNSUPPORTED: "The metadata asks for an image treatment whose token count is not known.",
    Reason.CONFIG_CONFLICT: "Two metadata fields that must agree do not.",
    Reason.MODEL_UNSUPPORTED: "No image family is known for this model type.",
    Reason.PLACEHOLDER_SPLIT: "The tokenizer does not read a placeholder or delimiter as its one configured token.",
    Reason.ENGINE_OVERRIDE: "The engine is said to run with image settings other than the checkpoint's.",
    Reason.NO_TOKENIZER: "The checkpoint's tokenizer could not be loaded.",
    Reason.NO_TEMPLATE: "The checkpoint has no chat template, so messages cannot be rendered as the engine would.",
    Reason.TEMPLATE_WITHOUT_PARTS: "The chat template reads no content parts; engines join them in different ways.",
    Reason.RENDER_FAILED: "The chat template failed on these messages.",
    Reason.TOKENIZE_FAILED: "The tokenizer failed on the rendered prompt.",
    Reason.BAD_REQUEST: "The request does not have the shape of any prompt that is read here.",
    Reason.BAD_TOKEN_IDS: "The request's token ids are not non-negative integers.",
    Reason.SEVERAL_PROMPTS: "The request holds several prompts; a plan is of one.",
    Reason.PROMPT_ALTERED: "The request makes the engine alter or replace the prompt.",
    Reason.REQUEST_OVERRIDE: "The request overrides image processing, which changes token counts and identities.",
    Reason.VIDEO: "Video frames are not planned: engines expand them to image placeholders.",
    Reason.AUDIO: "Audio is not planned.",
    Reason.UNKNOWN_PART: "A content part is of a type whose treatment by the engine is not known.",
    Reason.IDENTITY_INVALID: "An image identity in the request is not one an engine would take.",
    Reason.IDENTITY_COUNT: "There are not as many image identities as images; an engine would ignore them.",
    Reason.TOO_MANY_IMAGES: "The request holds more images than are planned.",
    Reason.IMAGE_MISSING: "An image part carries no image.",
    Reason.IMAGE_SOURCE: "An image is given in a form that is not read here.",
    Reason.IMAGE_ENCODING: "An image's data URI or base64 text is not valid.",
    Reason.IMAGE_FILE: "An image file cannot be read, or lies outside the allowed directories.",
    Reason.IMAGE_TOO_LARGE: "An image has more bytes or pixels than an engine would take.",
    Reason.IMAGE_FORMAT: "An image's format is not among those read here.",
    Reason.IMAGE_UNREADABLE: "An image's header cannot be read.",
    Reason.IMAGE_TRUNCATED: "An image's file ends before its data does.",
    Reason.IMAGE_SIZE: "An image has no width or no height.",
    Reason.IMAGE_ORIENTATION: "An image is turned by its metadata, engines disagree about that, and the counts differ.",
    Reason.REMOTE_REFUSED: "An image URL is not allowed by the fetch policy.",
    Reason.REMOTE_FAILED: "An image's dimensions could not be fetched.",
    Reason.COUNT_FAILED: "The image family has no token count for an image of this size.",
    Reason.COUNT_INVALID: "Image token counts are not positive integers, or not as many as images.",
    Reason.PLACEHOLDER_MISSING: "The request has images, the prompt has no placeholder.",
    Reason.PLACEHOLDER_COUNT: "The prompt has not as many placeholders as the request has images.",
    Reason.PLACEHOLDER_ADJACENT: "Placeholders stand side by side: the prompt looks already expanded.",
    Reason.PLACEHOLDER_BARE: "A placeholder is not directly between its begin and end delimiters.",
    Reason.DELIMITER_STRAY: "The prompt has image delimiters that belong to no image.",
    Reason.VIDEO_TOKENS: "The prompt has video tokens beside images.",
    Reason.TOKEN_RANGE: "A token id is as large as the values that stand for images in a cache.",
    Reason.PROMPT_TOO_LONG: "The expanded prompt is longer than the model's context.",
    Reason.NUL_IN_PROMPT: "The prompt holds a NUL character, which some frontends strip before encoding.",
    Reason.ORDER_CHANGED: "The template renders the images in another order than the request lists them.",
    Reason.ORDER_UNKNOWN: "It cannot be shown that the template keeps the order of the images.",
    Reason.INTERNAL: "The planner itself failed; please report it.",
}


class PlanningError(KvdError):
    """A plan cannot be exact. ``detail`` names the value, the bound and, where there is one, the remedy."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail or reason.sentence}")
        self.reason = reason
        self.detail = detail or reason.sentence


class CheckpointError(PlanningError):
    """A checkpoint's metadata."""


class BadRequest(PlanningError):
    """The request's shape."""


class PromptError(PlanningError):
    """Template or tokenizer."""


class ImageError(PlanningError):
    """One image."""


class CountError(PlanningError):
    """No token count for a size."""


class LayoutError(PlanningError):
    """The prompt's tokens and the request's images do not fit together."""


class MissingExtra(PlanningError, ImportError):
    """A package of the extra is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(Reason.MISSING_EXTRA, f"{package} is not installed: pip install kvd[planner]")


def shown(value: object, limit: int = 60) -> str:
    """A value for an error text: shortened, and a data URI only by its prefix (it is the user's picture)."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if not isinstance(value, str):
        return f"<{type(value).__name__}>" if isinstance(value, dict | list | tuple) else f"{value!r:.{limit}}"
    if value[:5].lower() == "data:":
        return f"{value.partition(',')[0][:limit]},…"
    return repr(value if len(value) <= limit else value[:limit] + "…")
