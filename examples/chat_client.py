"""A chat in the terminal: OpenAI's client, streaming from a server of ours.

    headstart serve                      # in another terminal
    python examples/chat_client.py

An empty line, or Ctrl-D, ends it. It needs `pip install openai`.
"""

import sys

from openai import OpenAI

MAX_TOKENS = 300


def main(address: str = "http://127.0.0.1:8000/v1", api_key: str = "none") -> None:
    client = OpenAI(base_url=address, api_key=api_key)
    model = client.models.list().data[0].id
    messages: list = []
    while question := ask(f"{model} › "):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer(client, model, messages)})


def ask(prompt: str) -> str:
    try:
        return input(prompt)
    except EOFError:
        return ""


def answer(client: OpenAI, model: str, messages: list) -> str:
    text, stats = "", {}
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=MAX_TOKENS,
        stream=True,
        extra_body={"num_draft_tokens": "auto"},  # what OpenAI's API does not have goes in here
    )
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            print(choice.delta.content or "", end="", flush=True)
        stats = getattr(chunk, "generation_stats", None) or stats  # on the last chunk
    print(f"\n[{stats['tokens_per_round']:.2f} tokens per round, {stats['generation_tps']:.1f} tokens/s]")
    return text


if __name__ == "__main__":
    main(*sys.argv[1:])
