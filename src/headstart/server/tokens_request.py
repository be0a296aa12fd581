"""Bodies of /tokenize and /detokenize, with the field names of llama.cpp's server, of vLLM and of SGLang."""

from typing import Annotated, Any

from pydantic import Field

from .errors import refuse
from .loaded_model import LoadedModel
from .prepare import Preparation
from .request_fields import ModelName, RequestModel, Text
from .response import encode_json

TokenId = Annotated[int, Field(ge=0)]


class TokenizeRequest(RequestModel):
    model: ModelName = None
    content: Text | None = Field(None, description="The text; the others call it `prompt`.")
    prompt: Text | None = None
    add_special: bool | None = Field(None, description="Add what the tokenizer begins texts with.")
    add_special_tokens: bool | None = Field(None, description="The same. True by default for a `prompt`.")
    parse_special: bool | None = Field(None, description="False: the text of an added token is plain text.")
    with_pieces: bool | None = Field(None, description="Report the text of each token too.")

    async def answer(self, served: LoadedModel, work: Preparation) -> str:
        """Return the JSON of the tokens, of which there may be as many as the context has."""
        field, text = ("prompt", self.prompt) if self.content is None else ("content", self.content)
        if text is None:
            refuse("content", "no text: send one")
        framed = self.add_special_tokens if self.add_special is None else self.add_special
        framed = field == "prompt" if framed is None else framed
        if self.parse_special is False:
            tokens = await work.encode(text, field, kind="literal")
            start = 0 if framed else len(await work.encode("", field, kind="text"))
            tokens = tokens[start:]
        else:
            tokens = await work.encode(text, field, kind="text" if framed else "chat")
        return await work.run(self._encoded, tokens, served)

    def _encoded(self, tokens: list[int], served: LoadedModel) -> str:
        found: list[Any] = tokens
        if self.with_pieces:
            found = [{"id": token, "piece": _piece(served.token_bytes(token))} for token in tokens]
        count = {"count": len(tokens), "max_model_len": served.model.context_length}
        return encode_json({"tokens": found, **count})


class DetokenizeRequest(RequestModel):
    model: ModelName = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

    async def text(self, served: LoadedModel, work: Preparation) -> dict[str, str]:
        vocabulary = served.model.vocabulary
        if (wrong := next((token for token in self.tokens if token >= vocabulary), None)) is not None:
            refuse("tokens", f"there is no token {wrong}: ids go from 0 to {vocabulary - 1}")
        text = str(await work.run(served.tokenizer.decode, self.tokens))
        return dict.fromkeys(("content", "prompt", "text"), text)


def _piece(spelling: bytes) -> str | list[int]:
    """Return the text of a token, or the bytes of a part of a character."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return list(spelling)
