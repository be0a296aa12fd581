"""The HTTP server: OpenAI's and Anthropic's APIs in front of the engine.

A chat request from HTTP to tokens and back, file by file:

1. `listen.py` accepts the connection, `middleware.py` checks host, key and body, `routes.py` has the routes.
2. `openai_request.py`, `responses_request.py`, `anthropic_request.py` or `llama_request.py` validates the body: a
   GenerationRequest. `responses_store.py` adds the conversation that a ResponsesRequest continues.
3. `request_handler.py` takes it from there: a `PendingAnswer` waits until the model is loaded (`model_pool.py`),
   prepares the prompt, submits it, and responds.
4. `prompt.py`: the messages and tools of every API become a `Chat` (`chat.py`). The model's ChatTemplate renders it
   to text, the text becomes tokens, and the answer gets its grammar (`markup/grammar.py`): a `Prompt`.
5. That runs in the threads of `prepare.py`, except long texts and the first trial of a grammar: these run in worker
   processes (`workers.py` starts and kills them). What they run is `worker.py`, which also guards control tokens.
6. `GenerationRequest.engine_request` adds the sampling parameters: an engine `Request`, submitted as a RunningRequest
   to the thread that runs the engine (`engine/engine_thread.py`).
7. That thread's events come back through `running_request.py`. `response.py`: ChoiceOutput passes their text through
   `markup/output_parser.py`, which turns it into deltas of content, reasoning and tool calls.
8. `openai_response.py`, `responses_response.py`, `anthropic_response.py` or `llama_response.py` writes them as JSON,
   whole or as server-sent events.
9. A disconnect, the deadline or the cancel route cancels the engine's Handle: see RunningRequest. `listen.py` drops
   clients that stop reading.
"""
