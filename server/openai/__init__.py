"""The OpenAI data plane: request fields, response shapes, routes."""

from server.openai.routes import router

__all__ = ["router"]
