"""A conversation in the form that chat templates take, whichever API it came by, and what the answer must be."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestError
from ..sampling import GrammarSpec
from ..sampling.bounds import MOST_NODES, count_nodes
from .errors import refuse
from .markup import CallFormat, Tools, any_of, call_grammar, schema_problem


@dataclass(frozen=True)
class Chat:
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()  # {"type": "function", "function": {"name", "description", "parameters"}}
    schema_field: str = "function.parameters"  # of a tool
    tool_choice: str = "auto"  # or none, required
    tool: str | None = None  # the one that must be called
    parallel_calls: bool = True
    thinking: bool | None = None  # None: the template's default
    thinking_field: str = "enable_thinking"  # the field that asked for it
    budget: int | None = None  # most tokens of reasoning
    template_options: Mapping[str, Any] = field(default_factory=dict)
    grammar: GrammarSpec | None = None  # of the answer after the reasoning
    grammar_field: str = "response_format"  # the field that asked for it

    @property
    def callable_tools(self) -> Tools:
        """The tools that the answer may call."""
        if self.tool_choice == "none":
            return {}
        functions = [tool["function"] for tool in self.tools]
        schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        return schemas if self.tool is None else {self.tool: schemas[self.tool]}

    @property
    def must_call(self) -> bool:
        return self.tool is not None or self.tool_choice == "required"

    def check(self, form: CallFormat) -> None:
        """Reject what this model, or any, cannot do."""
        functions = [tool["function"] for tool in self.tools]
        names = [function["name"] for function in functions]
        if self.tools and form.style is None:
            refuse("tools", "the model's chat template does not support tools: leave them out", "unsupported")
        if twice := next((name for name, count in Counter(names).items() if count > 1), None):
            refuse("tools", f"{twice!r} is defined twice: give every tool its own name")
        if sum(count_nodes(function.get("parameters")) for function in functions) > MOST_NODES:
            refuse("tools", f"their schemas have more than {MOST_NODES:,} values together: simplify them")
        for i, function in enumerate(functions):
            if problem := schema_problem(function.get("parameters") or {}):
                refuse(self._schema_field(i), f"{problem}: send a JSON Schema")
        if self.must_call and not self.tools:
            refuse("tool_choice", "requires a tool call, but there are no tools: send some")
        if self.tool is not None and self.tool not in names:
            refuse("tool_choice", f"{self.tool!r} is not one of the tools: name one of them")
        if self.must_call and self.grammar is not None:
            refuse(self.grammar_field, "cannot be combined with a tool_choice that requires a call: leave out one")
        if self.thinking and not form.thinks:
            refuse(self.thinking_field, "this model does not think: leave it out", "unsupported")
        if self.budget is not None and self.budget < 0:
            refuse("thinking_budget", f"is {self.budget}; it must be 0 or more tokens")

    def answer_grammar(self, form: CallFormat) -> GrammarSpec | None:
        """Return the grammar of what follows the reasoning. If there are tools, a call is always an answer."""
        tools = self.callable_tools
        if not tools or not (self.must_call or self.grammar):
            return self.grammar
        calls = call_grammar(tools, form, parallel=self.parallel_calls and self.tool is None)
        return calls if self.grammar is None else any_of(self.grammar, calls)

    def grammars_by_tool(self, form: CallFormat) -> Iterator[tuple[GrammarSpec, str]]:
        """Yield the grammar of a call of each tool, and the field of its schema."""
        tools = self.callable_tools
        for i, tool in enumerate(self.tools):
            if (name := tool["function"]["name"]) in tools:
                yield call_grammar({name: tools[name]}, form), self._schema_field(i)

    def _schema_field(self, index: int) -> str:
        return f"tools[{index}].{self.schema_field}"


def schema_grammar(schema: Any, field: str) -> GrammarSpec:
    """Return the grammar of a JSON Schema that came in `field`."""
    try:
        return GrammarSpec.json_schema(schema)
    except RequestError as error:
        refuse(field, str(error))
