"""A FastAPI application that streams answers. Concurrent requests are decoded in one batch.

    pip install uvicorn
    uvicorn --app-dir examples fastapi_app:app --port 8080
    curl -N -d '{"question": "Write a function that adds two numbers."}' -H 'Content-Type: application/json' \
        http://127.0.0.1:8080/generate
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from headstart import AsyncEngine, Request, SamplingParams, load


class Body(BaseModel):
    question: str
    max_tokens: int = 64
    temperature: float = 0.0


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    model, tokenizer = load()  # a folder, a built-in model, or a hub id such as "Qwen/Qwen3.6-27B"
    async with AsyncEngine(model, tokenizer, max_sequences=8) as engine:
        app.state.engine, app.state.tokenizer = engine, tokenizer
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/generate")
async def generate(body: Body) -> StreamingResponse:
    messages = [{"role": "user", "content": body.question}]
    prompt = app.state.tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)
    params = SamplingParams(max_tokens=body.max_tokens, temperature=body.temperature)

    async def text() -> AsyncIterator[str]:
        async for event in app.state.engine.stream(Request(prompt, params)):
            yield "".join(event.texts)  # a client that disconnects ends the loop, which cancels the request

    return StreamingResponse(text(), media_type="text/plain")
