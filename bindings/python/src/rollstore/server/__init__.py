"""The session server: agents that speak the OpenAI chat API are recorded, and need no change.

    python -m rollstore.server --store /dev/shm/run1 --engine http://127.0.0.1:30000 --top-k 32

A runner opens a session (POST /sessions), gives the agent its base_url, and ends it with a reward
(POST /sessions/{id}/end). Every call of the agent is asked of an engine with the candidates that
score centering needs, stored as the session's next turn, and answered without them.

    app         routes, checks, errors
    rewrite     a client's request -> the engine's
    engines     which engine, retries, time-outs
    proxy       one call from its request to its answer
    recording   a reply -> a stored turn, in a worker thread
    streaming   an answer as server-sent events
    sessions    what is known of each session; journal keeps it over a restart
    metrics     counters as Prometheus reads them
"""

from __future__ import annotations

from rollstore.server.app import make_app
from rollstore.server.settings import Settings

__all__ = ["Settings", "make_app"]
