"""Which family plans a model type. Chosen by ``config.json`` alone, before any processor file is looked for."""

from __future__ import annotations

from planner.checkpoint import Checkpoint
from planner.errors import CheckpointError, Reason, shown
from planner.families.family import Encode, ImageFamily
from planner.families.glm4v import Glm4v
from planner.families.glm5_next import Glm5Next

FAMILIES: tuple[type[ImageFamily], ...] = (Glm5Next, Glm4v)


def family_for(checkpoint: Checkpoint, encode: Encode) -> ImageFamily:
    """The checkpoint's image family, fully checked. Raises :class:`CheckpointError`."""
    model_type = checkpoint.config().get("model_type")
    for family in FAMILIES:
        if isinstance(model_type, str) and model_type in family.model_types:
            return family.from_checkpoint(checkpoint, encode)
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise CheckpointError(
        Reason.MODEL_UNSUPPORTED, f"config.json: model_type = {shown(model_type)}: images are planned for {known}"
    )
