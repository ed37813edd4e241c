"""Text in, token ids out, and back again: tokenizer, chat template, detokeniser, stop strings."""

from tp_engine.text.detokenizer import Detokenizer
from tp_engine.text.output import OutputText, Piece, TextDelta
from tp_engine.text.stop import StopMatcher
from tp_engine.text.tokenizer import ChatTemplateError, Tokenizer, TokenizerError

__all__ = [
    "ChatTemplateError",
    "Detokenizer",
    "OutputText",
    "Piece",
    "StopMatcher",
    "TextDelta",
    "Tokenizer",
    "TokenizerError",
]
