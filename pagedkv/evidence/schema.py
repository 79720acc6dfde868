"""The JSON schemas of workflow/schemas, read once."""

from __future__ import annotations

import functools
import json
from pathlib import Path


class SchemaError(Exception):
    """A schema itself cannot be read; the message is one line that names the file."""


@functools.lru_cache(maxsize=8)
def validator(root: str, name: str):
    """A jsonschema validator for `workflow/schemas/<name>.json`. Raises `SchemaError` where that is not a schema."""
    import jsonschema

    path = Path(root) / "workflow" / "schemas" / f"{name}.json"
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator.check_schema(schema)
    except OSError as error:
        raise SchemaError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise SchemaError(f"{path}: corrupt, not JSON ({error})") from None
    except jsonschema.SchemaError as error:
        raise SchemaError(f"{path}: not a JSON schema: {error.message[:160]}") from None
    return jsonschema.Draft202012Validator(schema)
