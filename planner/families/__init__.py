"""Image families: how many tokens an image of some size stands for, and where they go in the prompt.

One interface (:class:`~planner.families.family.ImageFamily`), one member per model line, one registry.
"""

from planner.families.family import ContextBudget, ImageFamily, PromptKind
from planner.families.registry import FAMILIES, family_for

__all__ = ["FAMILIES", "ContextBudget", "ImageFamily", "PromptKind", "family_for"]
