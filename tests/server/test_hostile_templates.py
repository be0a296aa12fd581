"""A chat template that never ends: the server listens, chats are refused, and other requests are served."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile import target
from running import pooled_model, read

from headstart.checkpoint import load_tokenizer, resolve
from headstart.server.errors import Refusal
from headstart.server.openai_request import ChatCompletionRequest

SAID: Any = [{"role": "user", "content": "Hello"}]
CHATS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": SAID},
    "messages": {"messages": SAID, "max_tokens": 5},
    "responses": {"input": "Hello"},
}


def test_a_server_starts_without_a_template_that_never_ends(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve("tiny-qwen3.5"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}")
    with target(model=str(folder)) as server, server.http() as http:
        for path, body in CHATS.items():
            answer = http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 400, answer.text
            assert "it recurses without end: use /v1/completions" in answer.text
        assert server.small()
        assert "the chat template is not used" in server.log()


@pytest.mark.parametrize(
    "error", ["RecursionError", "ZeroDivisionError", "MemoryError", "UndefinedError", "UnicodeEncodeError"]
)
def test_whatever_a_template_does_with_a_conversation_is_a_refusal(error: str) -> None:
    tokenizer = load_tokenizer(resolve("tiny-qwen3.5"))
    tokenizer._tokenizer.chat_template = (
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{% set said = messages[0].content %}{{ said }}"
        "{% if said == 'RecursionError' %}{{ f(1) }}{% elif said == 'ZeroDivisionError' %}{{ 1 / 0 }}"
        "{% elif said == 'MemoryError' %}{{ 'a' * 10 ** 17 }}{% elif said == 'UnicodeEncodeError' %}{{ '\\ud800' }}"
        "{% elif said == 'UndefinedError' %}{{ a.b }}{% endif %}"
    )
    known = replace(pooled_model(), load_tokenizer=lambda: tokenizer)

    def prompt(text: str) -> list[int]:
        return read(ChatCompletionRequest.model_validate({"messages": [SAID[0] | {"content": text}]}), known).tokens

    with pytest.raises(Refusal, match=f"chat template rejects them: {error}") as refused:
        prompt(error)
    assert (refused.value.status_code, refused.value.param) == (400, "messages")
    assert prompt("Hello") == tokenizer.encode("Hello")
