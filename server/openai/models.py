"""``/v1/models``."""

from __future__ import annotations

from server.errors import UnknownModel
from server.openai.shapes import ModelList, ModelObject
from tp_engine.messages import ModelCard, Ready


def model_list(ready: Ready, created: int) -> ModelList:
    """All models that take requests; ``created`` is when the server started, in Unix seconds."""
    return ModelList(data=[_object(card, ready, created) for card in ready.models if not card.held])


def model_object(name: str, ready: Ready, created: int) -> ModelObject:
    """One of them. Raises `UnknownModel`."""
    for card in ready.models:
        if card.name == name and not card.held:
            return _object(card, ready, created)
    raise UnknownModel(f"the model {name!r} does not exist", param="model")


def _object(card: ModelCard, ready: Ready, created: int) -> ModelObject:
    return ModelObject(
        id=card.name,
        created=created,
        root=card.root,
        parent=card.parent,
        max_model_len=ready.max_model_len,
        revision=card.revision,
    )
