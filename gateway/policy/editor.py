"""What editors get: the JSON Schema of the policy file, as the text of configs/tenants.schema.json. A test compares the two, so
that completion in an editor never offers what the loader refuses."""

from __future__ import annotations

import json

from fairlane.config.json_schema import json_schema
from fairlane.gateway.policy.schema import PolicyFile


def schema_text() -> str:
    """The schema, indented, ending in a newline."""
    return json.dumps(json_schema(PolicyFile, "Fairlane tenant policy"), indent=2) + "\n"
