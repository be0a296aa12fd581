"""A program written for mlx-lm. It moved over by its import, and nothing else.

python examples/from_mlx_lm.py "Write a function that adds two numbers."
"""

import sys

# from mlx_lm import load, stream_generate
from headstart import load, stream_generate


def main(question: str, model_name: str = "tiny-qwen3.5") -> None:
    model, tokenizer = load(model_name)  # a folder, a built-in model, or a hub id such as Qwen/Qwen3.6-27B
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)

    for response in stream_generate(model, tokenizer, prompt, max_tokens=200):
        print(response.text, end="", flush=True)
    print(f"\n\n{response.generation_tokens} tokens, {response.generation_tps:.1f} tokens/s")

    # The one thing that mlx-lm's responses do not have: what the head did.
    stats = response.stats
    print(f"{stats.tokens_per_round:.2f} tokens per round, {stats.accepted_draft_tokens} of them drafts")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["Write a Python function that reads a JSON file and returns its contents."])
