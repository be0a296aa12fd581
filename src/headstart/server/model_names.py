"""The names by which clients call the models of a server."""

from collections.abc import Mapping, Sequence

from ..errors import RequestError
from .errors import Refusal
from .pooled_model import PooledModel


class ModelNames:
    def __init__(self, models: Sequence[PooledModel]):
        """`models`: of the server, now and later."""
        self._models = models
        self._aliases: dict[str, str] = {}
        self._default: str | None = None

    def use(self, aliases: Mapping[str, str], default: str | None) -> None:
        """Let clients use other names too: those of `aliases`, and with a `default` any name."""
        named = {f"--model-alias {alias}": name for alias, name in aliases.items()} | {"--default-model": default}
        for option, name in named.items():
            if name is not None and self._named(name) is None:
                raise RequestError(f"{option}: {name} is not one of the models that are served")
        if taken := next((name for name in aliases if self._named(name) is not None), None):
            raise RequestError(f"--model-alias {taken}: a model that is served has this name")
        self._aliases, self._default = dict(aliases), default

    def of(self, model: PooledModel) -> list[str]:
        """Return the aliases of a model."""
        return [alias for alias, name in self._aliases.items() if self._named(name) is model]

    def resolve(self, name: str | None) -> str | None:
        """Return the name of a model that a client's name stands for."""
        name = self._aliases.get(name, name) if name is not None else None
        return name if name is None or self._named(name) is not None else self._default or name

    def find(self, name: str | None) -> PooledModel:
        """Return the model that a request names, by default the first."""
        resolved = self.resolve(name)
        found = self._models[0] if resolved is None else self._named(resolved)
        if found is None:
            ids = ", ".join(repr(entry["id"]) for each in self._models[:20] for entry in each.entries())
            message = f"model {str(name)[:100]!r} is not served here: this server has {ids}"
            raise Refusal(404, message, param="model", code="model_not_found")
        return found

    def _named(self, name: str) -> PooledModel | None:
        return next((each for each in self._models if each.answers_to(name) or each.adapter_of(name)), None)
