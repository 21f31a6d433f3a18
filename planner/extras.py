"""The optional packages: imported when first needed, with one clear error where they are missing."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from types import ModuleType

from planner.errors import MissingExtra


def require(module: str) -> ModuleType:
    """Import a module of the extra. Raises :class:`MissingExtra` naming the package to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra((error.name or module).partition(".")[0]) from error


@cache
def transformers() -> ModuleType:
    """transformers, without its notice about a missing torch: templates and tokenizers need none."""
    logger = logging.getLogger("transformers")
    logger.addFilter(_not_about_torch)
    try:
        return require("transformers")
    finally:
        logger.removeFilter(_not_about_torch)


def _not_about_torch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
