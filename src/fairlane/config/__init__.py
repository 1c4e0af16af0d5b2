"""Strict configuration: dataclasses as schemas, YAML with positions in, every mistake reported at once."""
