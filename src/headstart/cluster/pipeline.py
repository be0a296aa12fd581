"""Pipeline parallel: every machine has some of the layers, for models that do not fit otherwise.

A window goes from machine to machine, and what the last one makes of it goes to all. From there on everybody judges
the drafts for itself and commits to its own layers' memory what stands: no state ever travels.
"""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from ..models import Model
from .wire import Wire


@dataclass(frozen=True, eq=False)
class Pipeline:
    wire: Wire
    begin: int  # the first layer here
    end: int
    layers: int

    @classmethod
    def of(cls, config: dict[str, Any], wire: Wire) -> "Pipeline":
        """Of the model that config.json's text part describes; the first machines have a layer more."""
        layers, ranks = int(config["num_hidden_layers"]), wire.ranks
        if layers < ranks:
            raise CheckpointError(
                f"config.json: num_hidden_layers is {layers}, too few for {ranks} machines: use fewer"
            )
        each, more = divmod(layers, ranks)
        begin = wire.rank * each + min(wire.rank, more)
        return cls(wire, begin, begin + each + (wire.rank < more), layers)

    @property
    def ranks(self) -> int:
        return self.wire.ranks

    @property
    def ends(self) -> bool:
        return self.end == self.layers

    @property
    def operations(self) -> int:
        """In one pass, one after the other: from each to the next, and then to all."""
        return self.ranks

    def holds(self, name: str) -> bool:
        stack, layer, *_ = name.split(".")
        return stack != "layers" or self.begin <= int(layer) < self.end

    def cut(self, name: str, array: mx.array) -> mx.array:
        return array

    def fit(self, model: Model) -> Model:
        model.weights.layers = model.weights.layers[self.begin : self.end]
        return replace(model, share=self)

    def take(self, x: mx.array) -> mx.array:
        return x if self.begin == 0 else self.wire.receive(x, self.wire.rank - 1)

    def whole(self, part: mx.array) -> mx.array:
        return part

    def give(self, x: mx.array) -> mx.array:
        if not self.ends:
            x = self.wire.send(x, self.wire.rank + 1)
        output = self.wire.gather(x)[-1]
        # Messages must go in one order everywhere, and go even where nobody here looks at the output.
        mx.async_eval(output)
        return output

    def everywhere(self, here: bool) -> bool:
        return self.wire.everywhere(here)
