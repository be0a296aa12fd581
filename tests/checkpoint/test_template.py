"""Chat templates that loop, recurse or fill the memory are found out before they are used."""

from typing import Any

import pytest

from headstart.checkpoint import load_tokenizer, resolve
from headstart.checkpoint.template import chat_tokens, template_problem
from headstart.engine.turns import TurnMarker
from headstart.errors import CheckpointError

USER = {"role": "user", "content": "Hello"}
DOUBLED = "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
RECURSES = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"
SPINS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


class Template:
    """A tokenizer that only has a chat template."""

    def __init__(self, template: Any):
        self.chat_template, self.has_chat_template = template, True

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        return 1 // 0


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        pytest.param(RECURSES, "recurses", id="recursion"),
        pytest.param({"default": "x", "tool_use": RECURSES}, "recurses", id="recursion in one of two"),
        pytest.param("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recurses", id="depth"),
        pytest.param("{% if tools %}" + SPINS + "{% endif %}", "too long", id="loop with tools"),
        pytest.param("{% if messages | length > 3 %}" + DOUBLED + "{% endif %}", "memory", id="doubling"),
        pytest.param("{{ 'a' * 10 ** 11 }}", "memory", id="size"),
        pytest.param("{{ messages | tojson(indent=10 ** 9) }}", "memory", id="indentation"),
        pytest.param("{% generation %}{% for i in range(2000) %}{{ 'a' * 1000 }}{% endfor %}{% endgeneration %}",
                     "writes more", id="output"),
    ],
)  # fmt: skip
def test_a_template_that_takes_too_much_is_not_used(template: Any, problem: str) -> None:
    tokenizer: Any = Template(template)
    assert problem in str(template_problem(tokenizer))
    assert TurnMarker.of(tokenizer) is None
    with pytest.raises(CheckpointError, match=f"not used: .*{problem}.*: use `headstart generate --raw`"):
        chat_tokens(tokenizer, [USER])


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% for %}", "{{ messages[0].x.y }}", "{{ 1 / 0 }}"]
)
def test_a_template_that_fails_is_an_error_where_it_is_used(template: str) -> None:
    tokenizer: Any = Template(template)
    assert template_problem(tokenizer) is None
    with pytest.raises(CheckpointError, match=r"rejects this: ZeroDivisionError: .*"):
        chat_tokens(tokenizer, [USER])


@pytest.mark.parametrize("name", ["tiny-qwen3.5", "tiny-qwen3.5-moe"])
def test_ordinary_templates_are_used(name: str) -> None:
    assert chat_tokens(load_tokenizer(resolve(name)), [USER])
