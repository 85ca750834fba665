"""Which heads and head dims do public GDN models have, on each GPU of a tensor-parallel group? The data is models.json.

Heads are those of the Hugging Face configs; fla-gated-deltanet is the default of the layer in flash-linear-attention.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
from dataclasses import dataclass

from .errors import InputError


@dataclass(frozen=True)
class ModelShape:
    """Heads and head dims of one GPU's share of a layer."""

    H: int
    HV: int
    K: int
    V: int

    def on(self, tp: int) -> ModelShape:
        """The share of one GPU of `tp`.

        Raises:
            InputError: the heads cannot be shared out evenly.
        """
        if tp < 1 or self.H % tp or self.HV % tp:
            possible = [n for n in range(1, self.H + 1) if self.H % n == 0 and self.HV % n == 0]
            raise InputError(
                f"{self.H}:{self.HV} heads can be shared by {', '.join(map(str, possible))} GPUs; "
                f"got a tensor parallel size of {tp}"
            )
        return ModelShape(self.H // tp, self.HV // tp, self.K, self.V)


@functools.cache
def models() -> dict[str, ModelShape]:
    """The shapes by model, each on one GPU."""
    text = importlib.resources.files(__package__).joinpath("models.json").read_text()
    return {name: ModelShape(**shape) for name, shape in json.loads(text).items()}


def model(name: str) -> ModelShape:
    """The shape of a model; upper or lower case, with or without its organisation.

    Raises:
        InputError: it is not in the list.
    """
    known = models()
    wanted = name.lower().rsplit("/", 1)[-1]
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=3) or sorted(known)
        raise InputError(
            f"there are no heads of a model {name!r} in models.json; there are {', '.join(near)}; "
            "for another model pass --heads and --dims"
        )
    return known[wanted]
