"""Headstart as an application of Ray Serve: replicas of one server, each with its own engine.

    pip install '.[cpu,ray]'    # or [cuda,ray]
    MODEL=Qwen/Qwen3.6-27B REPLICAS=2 serve run contrib.ray_serve:app

MODEL may name several models with commas between them: each replica loads the one that a request names. Requests go
to the replica with the shorter queue; a client that sends the header `serve_multiplexed_model_id` with the id of its
conversation stays with the replica that has its prefix. HEADSTART_API_KEY is the key, or keys with spaces.
"""

import os
from typing import Any

from ray import serve

REPLICAS = int(os.environ.get("REPLICAS", "1"))
CONVERSATIONS = 256  # that a replica remembers as its own


@serve.deployment(num_replicas=REPLICAS, max_ongoing_requests=64, graceful_shutdown_timeout_s=60)
@serve.ingress()
class Headstart:
    """A replica. Its actor's GPU, if it has one, is MLX's."""

    async def __init__(self, models: list[str]):
        from headstart.cli.download import find_model
        from headstart.engine import DeviceThread
        from headstart.server.app import create_app
        from headstart.server.middleware import Keys
        from headstart.server.model_pool import ModelPool
        from headstart.server.pooled_model import PooledModel
        from headstart.server.routes import open_app
        from headstart.server.settings import Limits
        from headstart.server.states import ServerState

        pool = ModelPool(DeviceThread(), [PooledModel.of(find_model(name)) for name in models], limits=Limits())
        self.server_state = ServerState(names=models)
        keys = Keys(os.environ.get("HEADSTART_API_KEY", "").split())
        self.server = create_app(self.server_state, keys=keys, limits=pool.limits, allowed_hosts=("*",))
        await open_app(self.server, self.server_state, pool)
        await pool.load(pool.models[0])
        await pool.warm_up(pool.models[0])
        self.server_state.doing = None

    @serve.multiplexed(max_num_models_per_replica=CONVERSATIONS)
    async def conversation(self, id: str) -> str:
        return id

    def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope.setdefault("state", {})
            if id := serve.get_multiplexed_model_id():
                await self.conversation(id)  # so that Ray sends the rest of it here too
            await self.server(scope, receive, send)

        return app

    def check_health(self) -> None:
        if self.server_state.health().status == "unhealthy":
            raise RuntimeError(self.server_state.health().reason)


app = Headstart.bind(os.environ.get("MODEL", "tiny-qwen3.5").split(","))
