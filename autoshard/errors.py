"""Errors that a user can meet; each says what was given, which rule it breaks and what to change."""

from __future__ import annotations

__all__ = ["AutoshardError", "PlanFileError", "PlanMismatchError", "SpecError", "TraceError"]


class AutoshardError(Exception):
    """Base of the errors that autoshard raises about its input."""


class TraceError(AutoshardError, ValueError):
    """The function or its arguments cannot be traced."""


class SpecError(AutoshardError, ValueError):
    """A PartitionSpec does not fit its array or the mesh."""


class PlanFileError(AutoshardError, ValueError):
    """A plan file is damaged or of another format version."""


class PlanMismatchError(AutoshardError, ValueError):
    """A plan was made for another function, other shapes or another mesh."""
