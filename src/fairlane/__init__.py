"""Fairlane: a multi-tenant, priority-scheduling LLM inference gateway."""

__version__ = "0.1.0"
