"""Prompts by kind: the built-in ones, and files whose mistakes are named by their line."""

from pathlib import Path

import pytest

from headstart.bench.prompts import KINDS, builtin_prompts, by_kind, read_prompts
from headstart.checkpoint import load_tokenizer, resolve
from headstart.errors import RequestError


def test_every_kind_has_eight_prompts_that_differ() -> None:
    prompts = builtin_prompts()
    for kind in KINDS:
        assert len({prompt for prompt in map(repr, prompts) if f"kind='{kind}'" in prompt}) == 8


def test_kinds_are_chosen_and_an_unknown_one_is_refused() -> None:
    assert {prompt.kind for prompt in builtin_prompts(["prose", "code"])} == {"prose", "code"}
    with pytest.raises(RequestError, match="--kinds: 'poems' is not one of code, prose, chat, repetitive"):
        builtin_prompts(["code", "poems"])


def test_conversations_become_what_the_chat_template_makes_of_them_and_texts_stay_as_they_are() -> None:
    tokenizer = load_tokenizer(resolve(None))
    tokens = by_kind(builtin_prompts(), tokenizer)
    assert list(tokens) == list(KINDS)
    assert tokenizer.decode(tokens["chat"][0]).startswith("<|im_start|>user\nWhat is the difference")
    assert tokenizer.decode(tokens["chat"][0]).endswith("<think>\n\n</think>\n\n")
    assert tokenizer.decode(tokens["code"][1]).startswith("class Stack:")
    assert tokenizer.decode(tokens["code"][1]).endswith("def push(self, item):\n")


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
        ("{", "line 2: not JSON"),
        ("[1]", 'line 2: must be an object with either "text" or "messages"'),
        ('{"text": "a", "messages": []}', 'line 2: must be an object with either "text" or "messages"'),
        ('{"text": ""}', 'line 2: "text" must be a string that is not empty'),
        ('{"text": "a", "king": "code"}', 'line 2: "king" is not a field'),
        ('{"text": "a", "kind": 3}', 'line 2: "kind" must be a word'),
        ('{"messages": [{"role": "user"}]}', 'line 2: "messages" must be a list of objects'),
    ],
)
def test_a_bad_line_is_refused_by_its_number(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(RequestError, match=message):
        read_prompts(file)


def test_a_file_that_is_empty_missing_or_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    with pytest.raises(RequestError, match="cannot be read as text"):
        read_prompts(file)
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RequestError, match="cannot be read as text"):
        read_prompts(file)
    file.write_text(" \n")
    with pytest.raises(RequestError, match="there is no prompt in it"):
        read_prompts(file)
