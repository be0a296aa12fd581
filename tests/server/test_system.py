"""System and developer messages anywhere in a chat, whatever the template supports."""

from typing import Any

import pytest
from running import tokenizer
from scripted import scripted

REFUSES = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('only first') }}{% endif %}"
LEAVES_OUT = "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}"


def said(*words: str) -> list[dict[str, Any]]:
    """From `role: text`."""
    return [dict(zip(("role", "content"), each.split(": "), strict=True)) for each in words]


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (REFUSES, said("user: a", "system: b", "user: c"), "[user]a[user]b[user]c"),
        (REFUSES, said("system: a", "user: b", "developer: c", "user: d"), "[system]a[user]b[user]c[user]d"),
        (REFUSES, said("system: a", "developer: b", "user: c"), "[system]a\n\nb[user]c"),
        (REFUSES, said("developer: a", "user: b"), "[system]a[user]b"),
        (LEAVES_OUT, said("system: a", "user: b", "system: c"), "[system]a[user]b[user]c"),
        (LEAVES_OUT, said("system: a", "system: b", "user: c"), "[system]a\n\nb[user]c"),
        ("", said("system: a", "system: b", "user: c", "developer: d"), "[system]a[system]b[user]c[system]d"),
    ],
)
def test_no_system_message_is_lost_or_refused(
    monkeypatch: pytest.MonkeyPatch, template: str, messages: Any, prompt: str
) -> None:
    """Those at the beginning are one, and late ones stay where they are, as the user's."""
    written = "{% for m in messages %}" + template + "[{{ m.role }}]{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer()._tokenizer, "chat_template", written)
    with scripted("hello") as (server, room):
        server.openai().chat.completions.create(model="tiny", messages=messages)
        assert tokenizer().decode(room.requests[-1].prompt) == prompt
