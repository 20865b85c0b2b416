"""The tools of a user's class: its public methods with types and a docstring. Runs in the worker process."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError

from megarl.episodes.protocol import ToolSchema
from megarl.system.user_worker import UserError
from megarl.types import JsonValue

RESERVED = ("score", "close")
"""Methods that are not tools."""
_PLAIN = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class BadArgumentsError(Exception):
    """The model's arguments are not those of the tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMethod:
    schema: ToolSchema
    arguments: type[BaseModel]

    def read(self, arguments: Mapping[str, JsonValue]) -> dict[str, object]:
        """Return the arguments in the types that the method declares; a BadArgumentsError if they do not fit."""
        try:
            read = self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in error.errors()]
            raise BadArgumentsError("; ".join(problems[:5])) from None
        return {name: getattr(read, name) for name in self.arguments.model_fields if name in read.model_fields_set}


def tool_methods(cls: type) -> dict[str, ToolMethod]:
    """Return the tools by name; a UserError for a public method that cannot be one."""
    methods = inspect.getmembers(cls, inspect.isfunction)
    return {name: _method(cls, name, function) for name, function in methods if _is_tool(name)}


def _is_tool(name: str) -> bool:
    return not name.startswith("_") and name not in RESERVED


def _method(cls: type, name: str, function: Callable[..., object]) -> ToolMethod:
    where = f"the tool {cls.__name__}.{name}"
    description = inspect.getdoc(function)
    if not description:
        raise UserError("path", f"{where} has no docstring; write what it does, or begin its name with _")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise UserError("path", f"{where} has a type that cannot be read: {error}") from None
    fields: dict[str, object] = {}
    for parameter in [*inspect.signature(function).parameters.values()][1:]:
        if parameter.kind not in _PLAIN:
            raise UserError("path", f"{where} takes {parameter}; a model gives arguments by name: list them")
        if parameter.name not in hints:
            raise UserError(
                "path", f"{where} has no type for {parameter.name}; write one, such as {parameter.name}: int"
            )
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    try:
        arguments = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)  # type: ignore[call-overload]
        parameters = _without_titles(arguments.model_json_schema())
    except (PydanticUserError, PydanticSchemaGenerationError, NameError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError("path", f"{where} has a type that is not JSON: {reason}") from None
    assert isinstance(parameters, dict)
    schema = ToolSchema(name=name, description=description, parameters=parameters)
    return ToolMethod(schema=schema, arguments=arguments)


def _without_titles(schema: JsonValue) -> JsonValue:
    """Return the schema without the titles that pydantic makes of names: tokens that say nothing."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_titles(item) for key, item in schema.items() if key != "title" or isinstance(item, dict)}
