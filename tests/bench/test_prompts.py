"""Prompts by kind: the built-in ones, and files whose mistakes are named by their line."""

import re
from pathlib import Path

import pytest

from headstart.bench.prompts import COPYING, KINDS, builtin_prompts, prompts_by_kind, read_prompts
from headstart.checkpoint import load_tokenizer, resolve
from headstart.errors import RequestError


def test_every_kind_has_eight_prompts_that_differ() -> None:
    prompts = builtin_prompts()
    for kind in KINDS:
        assert len({prompt for prompt in map(repr, prompts) if f"kind='{kind}'" in prompt}) == 8


def test_prompts_whose_answers_repeat_them_are_used_where_they_are_named() -> None:
    chosen = prompts_by_kind(COPYING)
    assert list(chosen) == ["edit", "json"]
    assert len({prompt.as_text for prompts in chosen.values() for prompt in prompts}) == 8
    assert not set(COPYING) & {prompt.kind for prompt in builtin_prompts()}


def test_kinds_and_files_are_chosen_together_and_an_unknown_name_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("Once upon a time\n")
    chosen = prompts_by_kind(["code", str(own)])
    assert list(chosen) == ["code", "own"]
    assert [prompt.text for prompt in chosen["own"]] == ["Once upon a time"]
    assert len(chosen["code"]) == 8
    with pytest.raises(
        RequestError, match="--prompts poems: not one of code, prose, chat, repetitive, edit, json, and not"
    ):
        prompts_by_kind(["code", "poems"])


def test_conversations_become_what_the_chat_template_makes_of_them_and_texts_stay_as_they_are() -> None:
    tokenizer = load_tokenizer(resolve(None))
    prompts = prompts_by_kind(KINDS)
    chat = tokenizer.decode(prompts["chat"][0].tokens(tokenizer))
    assert chat.startswith("<|im_start|>user\nWhat is the difference")
    assert chat.endswith("<think>\n\n</think>\n\n")
    code = tokenizer.decode(prompts["code"][1].tokens(tokenizer))
    assert code.startswith("class Stack:")
    assert code.endswith("def push(self, item):\n")


def test_without_a_chat_template_a_conversation_is_its_paragraphs() -> None:
    tokenizer = load_tokenizer(resolve(None))
    tokenizer.has_chat_template = False
    chat = next(prompt for prompt in builtin_prompts(["chat"]) if len(prompt.messages) == 3)
    text = tokenizer.decode(chat.tokens(tokenizer))
    assert text == "\n\n".join(message["content"] for message in chat.messages) + "\n\n"


def test_a_file_of_lines_and_a_file_of_objects_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("Once upon a time\n\ndef main():\n")
    assert [(p.kind, p.text) for p in read_prompts(lines)] == [("own", "Once upon a time"), ("own", "def main():")]
    objects = tmp_path / "objects.jsonl"
    objects.write_text('{"kind": "a", "text": "x\\ny"}\n{"messages": [{"role": "user", "content": "Hello"}]}\n')
    first, second = read_prompts(objects)
    assert (first.kind, first.text) == ("a", "x\ny")
    assert (second.kind, second.messages) == ("own", ({"role": "user", "content": "Hello"},))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Invalid JSON"),
        *[
            (line, 'Write {"text": "…"} or {"messages": ')
            for line in (
                "[1]",
                '{"text": "a", "messages": [{"role": "user", "content": "b"}]}',
                '{"text": ""}',
                '{"text": 3}',
                '{"messages": []}',
                '{"messages": [{"role": "user"}]}',
                '{"text": "a", "king": "code"}',
                '{"text": "a", "kind": 3}',
            )
        ],
    ],
)
def test_a_bad_line_is_refused_by_its_number(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(RequestError, match=re.escape(message)):
        read_prompts(file)


def test_a_file_that_is_empty_missing_or_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    with pytest.raises(RequestError, match="not a readable file"):
        read_prompts(file)
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RequestError, match="not a readable file"):
        read_prompts(file)
    file.write_text(" \n")
    with pytest.raises(RequestError, match="the file has no prompt"):
        read_prompts(file)
