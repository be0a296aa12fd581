"""A conversation in the words of chat templates, whichever API it came by, and what must come of it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestError
from ..sampling import GrammarSpec
from ..sampling.bounds import MAX_NODES, count_nodes
from .errors import refuse
from .markup import Dialect, Tools, call_grammar, either, flaw


@dataclass(frozen=True)
class Chat:
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()  # {"type": "function", "function": {"name", "description", "parameters"}}
    schema_field: str = "function.parameters"  # where a tool had its schema
    tool_choice: str = "auto"  # or none, required
    tool: str | None = None  # the one that must be called
    several: bool = True  # calls in one answer
    thinking: bool | None = None  # None: as the template has it
    thinking_field: str = "enable_thinking"  # that says so
    budget: int | None = None  # most tokens of a thought
    template: Mapping[str, Any] = field(default_factory=dict)  # further words for the template
    grammar: GrammarSpec | None = None  # of what is said once all is thought
    grammar_field: str = "response_format"  # that asked for it

    @property
    def callable(self) -> Tools:
        """The tools that this answer may call: the schemas of their arguments by name."""
        if self.tool_choice == "none":
            return {}
        functions = [tool["function"] for tool in self.tools]
        schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        return schemas if self.tool is None else {self.tool: schemas[self.tool]}

    @property
    def must_call(self) -> bool:
        return self.tool is not None or self.tool_choice == "required"

    def check(self, dialect: Dialect) -> None:
        """Refuse what this model, or any, cannot do."""
        names = [tool["function"]["name"] for tool in self.tools]
        if self.tools and dialect.format is None:
            refuse("tools", "the model's chat template has none: leave them out", "unsupported")
        if twice := next((name for name, count in Counter(names).items() if count > 1), None):
            refuse("tools", f"{twice!r} is there twice: give every tool a name of its own")
        if sum(count_nodes(tool["function"].get("parameters")) for tool in self.tools) > MAX_NODES:
            refuse("tools", f"their schemas have more than {MAX_NODES:,} values together: simplify them")
        for i, tool in enumerate(self.tools):
            if problem := flaw(tool["function"].get("parameters") or {}):
                refuse(self._schema_field(i), f"{problem}: send a JSON Schema")
        if self.must_call and not self.tools:
            refuse("tool_choice", "asks for a call, and there are no tools: send some")
        if self.tool is not None and self.tool not in names:
            refuse("tool_choice", f"{self.tool!r} is none of the tools: name one of them")
        if self.must_call and self.grammar is not None:
            refuse(self.grammar_field, "the answer must be a call, as tool_choice says: leave out one of the two")
        if self.thinking and not dialect.thinks:
            refuse(self.thinking_field, "this model does not think: leave it out", "unsupported")
        if self.budget is not None and self.budget < 0:
            refuse("thinking_budget", f"is {self.budget}; it must be 0 or more tokens")

    def answer_grammar(self, dialect: Dialect) -> GrammarSpec | None:
        """What may be said once all is thought. A call is always an answer where there are tools."""
        tools, several = self.callable, self.several and self.tool is None
        if self.must_call:
            return call_grammar(tools, dialect, several=several)
        if self.grammar is not None and tools:
            return either(self.grammar, call_grammar(tools, dialect, several=several))
        return self.grammar

    def call_grammars(self, dialect: Dialect) -> Iterator[tuple[GrammarSpec, str]]:
        """Of each tool alone, and the field that its schema came in."""
        tools = self.callable
        for i, tool in enumerate(self.tools):
            if (name := tool["function"]["name"]) in tools:
                yield call_grammar({name: tools[name]}, dialect), self._schema_field(i)

    def _schema_field(self, index: int) -> str:
        return f"tools[{index}].{self.schema_field}"


def shape_of(schema: Any, field: str) -> GrammarSpec:
    """The grammar of a JSON Schema that came in `field`."""
    try:
        return GrammarSpec.json_schema(schema)
    except RequestError as error:
        refuse(field, str(error))
