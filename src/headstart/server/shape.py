"""What bodies of requests are made of. Fields that a shape does not know are kept, so that they can be named."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from .markup import too_deep

MOST = 2**14  # of messages, and of parts of a message
MOST_TOOLS = 512  # the grammar of a call of any of them takes a second
Element = TypeVar("Element")
# Bodies hold millions of elements. The first that is wrong is told of, since to tell of all holds everyone up.
Listed = Annotated[list[Element], Field(max_length=MOST, fail_fast=True)]
Tools = Annotated[list[Element], Field(max_length=MOST_TOOLS, fail_fast=True)]


class Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    def unknown(self, within: str = "") -> Iterator[str]:
        """The names of fields that are not ours, such as `messages[].name`."""
        yield from (within + name for name, value in (self.model_extra or {}).items() if value is not None)
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Shape):
                yield from value.unknown(f"{within}{name}.")
            elif isinstance(value, list):
                for each in value:
                    if isinstance(each, Shape):
                        yield from each.unknown(f"{within}{name}[].")


def _whole(text: str) -> str:
    """JSON can hold half a character of two halves, which nothing can read or write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("Text should not hold half a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]


def _passable(value: dict[str, Any]) -> dict[str, Any]:
    """It goes on to templates and grammars, which must be able to write it."""
    if too_deep(value):
        raise ValueError("Object should not be nested so deeply")
    _whole(json.dumps(value, ensure_ascii=False))
    return value


Json = Annotated[dict[str, Any], AfterValidator(_passable)]
