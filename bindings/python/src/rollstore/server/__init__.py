"""The session server: agents that speak the OpenAI chat API are recorded, and need no change.

    python -m rollstore.server --store /dev/shm/run1 --engine http://127.0.0.1:30000 --top-k 32

A runner opens a session (POST /sessions), gives the agent its base_url, and ends it with a reward
(POST /sessions/{id}/end). Every call of the agent is asked of an engine with the candidates that
score centering needs, stored as the session's next turn, and answered without them.

    running     the process: start, signals, end
    app         routes, checks, errors
    rewrite     a client's request -> the engine's
    engines     which engine, retries, time-outs
    proxy       one call from its request to its answer
    recording   a reply -> a stored turn, in a worker thread
    streaming   an answer as server-sent events
    sessions    what is known of each session; journal keeps it over a restart
    metrics     counters as Prometheus reads them

It needs aiohttp, which is imported when a server is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollstore.server.settings import Settings

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["Settings", "make_app"]


def make_app(settings: Settings) -> web.Application:
    """The server as an aiohttp application. It opens the store when it starts, and closes it."""
    from rollstore.server.app import Server

    return Server(settings).app
