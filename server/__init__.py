"""The HTTP front end: an OpenAI-compatible API over an engine in another process."""

from server.app import create_app
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.errors import ApiError
from server.settings import FrontEndSettings

__all__ = ["ApiError", "EngineClient", "FrontEndSettings", "ServerConfig", "create_app"]
