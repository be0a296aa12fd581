"""An answer of a given shape: a grammar holds the model to a JSON schema, and drafts go on under it.

    python examples/structured.py

The built-in model knows little, but what it says is always a `Signature`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

import headstart

Name = Annotated[str, Field(pattern="^[a-z_]{2,20}$")]


class Argument(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else a model may add properties for ever
    name: Name
    type: Literal["str", "int", "float", "list", "dict", "Path"]


class Signature(BaseModel):
    model_config = ConfigDict(extra="forbid")
    function: Name
    arguments: Annotated[list[Argument], Field(min_length=1, max_length=3)]
    returns: Literal["str", "int", "float", "list", "dict", "None"]


def main(question: str = "Write a Python function that reads a JSON file and returns its contents.") -> Signature:
    model, tokenizer = headstart.load()
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)
    grammar = headstart.GrammarSpec.json_schema(Signature.model_json_schema())

    text = ""
    for response in headstart.stream_generate(model, tokenizer, prompt, max_tokens=200, grammar=grammar):
        text += response.text
    # What the grammar leaves no choice about, such as `"arguments": [`, is drafted with certainty.
    print(f"{response.stats.tokens_per_round:.2f} tokens per round")
    signature = Signature.model_validate_json(text)
    print(signature)
    return signature


if __name__ == "__main__":
    main()
