# SPDX-License-Identifier: Apache-2.0
"""As much of JSON Schema as the server's description uses: whether a value conforms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
    "number": (int, float),
    "integer": (int,),
}
KEYWORDS = frozenset(
    {"$ref", "anyOf", "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    | {"minLength", "maxLength", "minItems", "items", "properties", "required", "additionalProperties"}
    | {"title", "description", "default", "discriminator"}
)


class Schemas:
    """The components of an OpenAPI document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._schemas: Mapping[str, Any] = document["components"]["schemas"]

    def resolve(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Follow a reference."""
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rsplit("/", 1)[1]]
        return schema

    def conforms(self, value: Any, schema: Mapping[str, Any]) -> bool:
        """Whether ``value`` is what ``schema`` asks for."""
        schema = self.resolve(schema)
        unknown = set(schema) - KEYWORDS
        assert not unknown, f"the checker does not know {unknown}"
        if "anyOf" in schema:
            return any(self.conforms(value, option) for option in schema["anyOf"])
        if "enum" in schema and value not in schema["enum"]:
            return False
        if "const" in schema and value != schema["const"]:
            return False
        return self._type(value, schema) and self._bounds(value, schema) and self._parts(value, schema)

    def _type(self, value: Any, schema: Mapping[str, Any]) -> bool:
        kind = schema.get("type")
        if kind is None:
            return True
        if isinstance(value, bool):
            return bool(kind == "boolean")
        if kind == "integer" and isinstance(value, float):
            return value.is_integer()
        return isinstance(value, TYPES[kind])

    def _bounds(self, value: Any, schema: Mapping[str, Any]) -> bool:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (
                value >= schema.get("minimum", value)
                and value <= schema.get("maximum", value)
                and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
                and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
            )
        if isinstance(value, str):
            return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return not isinstance(value, list) or len(value) >= schema.get("minItems", 0)

    def _parts(self, value: Any, schema: Mapping[str, Any]) -> bool:
        if isinstance(value, list) and "items" in schema:
            return all(self.conforms(item, schema["items"]) for item in value)
        if not isinstance(value, dict):
            return True
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        for name, item in value.items():
            if name in properties:
                if not self.conforms(item, properties[name]):
                    return False
            elif others is False or (isinstance(others, dict) and not self.conforms(item, others)):
                return False
        return set(schema.get("required", ())) <= set(value)
