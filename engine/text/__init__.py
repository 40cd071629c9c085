"""Between text and token ids: chat templates, encoding, incremental decoding.

Loads tokenizers and jinja2, never torch or transformers.
"""

from __future__ import annotations

from engine.text.assets import ChatAssets, assets_from_folder, assets_from_gguf
from engine.text.codec import Codec
from engine.text.detokenizer import Detokenizer
from engine.text.errors import TemplateError
from engine.text.replies import ReplyMemory
from engine.text.stops import StopMatcher, StopStrings
from engine.text.vocabulary import Vocabulary

__all__ = [
    "ChatAssets",
    "Codec",
    "Detokenizer",
    "ReplyMemory",
    "StopMatcher",
    "StopStrings",
    "TemplateError",
    "Vocabulary",
    "assets_from_folder",
    "assets_from_gguf",
]
