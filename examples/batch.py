"""Many prompts in one batch: every sequence has its own parameters, its own acceptance and its own end.

python examples/batch.py
"""

from headstart import Engine, Request, SamplingParams, load

TASKS = (
    "Write a Python function that adds two numbers.",
    "Write a Python function that counts the words of a text.",
    "Write a Python function that merges two dictionaries.",
    "Write a Python function that reads a JSON file and returns its contents.",
)
HOW = (
    SamplingParams(max_tokens=32),  # greedy
    SamplingParams(max_tokens=32, temperature=0.7, top_p=0.9, seed=7),  # the same text every time
    SamplingParams(max_tokens=32, k=0),  # no drafts for this one
    SamplingParams(max_tokens=32, stop=["return"]),
)


def main() -> list[str]:
    model, tokenizer = load()
    engine = Engine(model, tokenizer, max_sequences=4)  # further requests would wait
    handles = []
    for task, params in zip(TASKS, HOW, strict=True):
        messages = [{"role": "user", "content": task}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)
        handles.append(engine.submit(Request(prompt, params)))

    texts = []
    for task, handle in zip(TASKS, handles, strict=True):
        text = ""
        for event in handle:  # iterating runs the engine for all sequences; events of the others are queued
            if event.error is not None:
                raise event.error
            text += "".join(event.texts)
        print(f"# {task}\n{text}\n# {event.finish_reason}, {event.stats.tokens_per_round:.2f} tokens per round\n")
        texts.append(text)
    return texts


if __name__ == "__main__":
    main()
