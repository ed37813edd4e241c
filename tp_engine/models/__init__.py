"""What a model is: its specification, rotary positions, and the decoder's forward pass."""

from tp_engine.models.decoder import Decoder
from tp_engine.models.fields import UnsupportedModel
from tp_engine.models.rope import RopeSpec
from tp_engine.models.spec import ModelSpec

__all__ = ["Decoder", "ModelSpec", "RopeSpec", "UnsupportedModel"]
