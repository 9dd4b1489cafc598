"""What the session server is told at its start."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Settings", "parse"]

MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """All settings; times in seconds, sizes in bytes. `parse` makes it from a command line."""

    store: str
    engines: tuple[str, ...]
    top_k: int = 32
    mode: Literal["selected", "support"] = "selected"
    candidates: Literal["flat", "nested"] = "flat"
    b64_flag: str = "return_flat_raw_top_logprobs_b64"
    temperature: float = 1.0
    top_p: float = 1.0
    sample_top_k: int = -1
    capacity: str | None = None
    durability: Literal["memory", "interval", "full"] = "memory"
    journal: str | None = None
    host: str = "127.0.0.1"
    port: int = 8700
    allow_hosts: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    engine_token: str | None = field(default=None, repr=False)
    no_token: bool = False
    timeout: float = 1800.0
    connect_timeout: float = 5.0
    retries: int = 2
    full_timeout: float = 60.0
    drain: float = 60.0
    body_limit: int = 64 * MIB
    reply_limit: int = 1024 * MIB
    threads: int = 2
    log_calls: bool = False

    @property
    def request(self) -> Literal["flat", "nested", "none"]:
        """How candidates are asked for."""
        return self.candidates if self.top_k > 0 else "none"

    @property
    def loopback(self) -> bool:
        """Is the server only reached from this host?"""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """A name or address of this host's loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from a command line. Tokens come from files or the environment: a command line can
    be read by every user of the host."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    try:
        token = _token(given.pop("token_file"), "ROLLSTORE_SERVER_TOKEN")
        engine_token = _token(given.pop("engine_token_file"), "ROLLSTORE_ENGINE_TOKEN")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    given["engines"] = tuple(url.rstrip("/") for url in given.pop("engine"))
    given["allow_hosts"] = tuple(given.pop("allow_host"))
    settings = Settings(**given, token=token, engine_token=engine_token)
    for fault in _faults(settings):
        parser.error(fault)
    return settings


def _faults(settings: Settings) -> list[str]:
    faults = []
    if not settings.loopback and settings.token is None and not settings.no_token:
        faults.append(
            f"--host {settings.host} can be reached from other hosts: set a token (--token-file, "
            "or ROLLSTORE_SERVER_TOKEN), or say --no-token where the network itself is trusted"
        )
    for url in settings.engines:
        if not url.startswith(("http://", "https://")):
            faults.append(f"--engine {url}: an http:// or https:// address is needed")
    if settings.top_k == 0 and settings.mode == "support":
        faults.append("--mode support records candidates: --top-k must be over 0")
    if settings.threads < 1:
        faults.append("--threads: 1 or more is needed")
    return faults


def _token(path: str | None, variable: str) -> str | None:
    if path is None:
        return os.environ.get(variable) or None
    with open(path, encoding="utf-8") as file:
        token = file.read().strip()
    if not token:
        raise ValueError(f"{path} is empty: a token is needed")
    return token


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 1)
    return _count(text[:-1] if unit > 1 else text) * unit


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollstore.server",
        description="Record the calls of agents that speak the OpenAI chat API into a store.",
    )
    add = parser.add_argument
    add("--store", required=True, help="the store's folder; created when there is none")
    add("--engine", required=True, action="append", metavar="URL", help="an inference engine")
    add("--top-k", type=_count, default=32, help="candidates a token; 0 records none (32)")
    add("--mode", choices=["selected", "support"], default="selected")
    add(
        "--candidates",
        choices=["flat", "nested"],
        default="flat",
        help="how selected candidates are asked for; nested for engines without flat fields",
    )
    add("--b64-flag", default=Settings.b64_flag, help="the engine's name of its base64 flag")
    add("--temperature", type=float, default=1.0, help="of training requests (1.0)")
    add("--top-p", type=float, default=1.0, help="of training requests in support mode (1.0)")
    add(
        "--sample-top-k",
        type=int,
        default=-1,
        help="sampling's top_k in support mode, where a request has none",
    )
    add("--capacity", help='of a new store, such as "8G"')
    add("--durability", choices=["memory", "interval", "full"], default="memory")
    add("--journal", help="the server's own file (server.journal in the store's folder)")
    add("--host", default=Settings.host)
    add("--port", type=_count, default=Settings.port, help="0 takes a free one (8700)")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name that clients may call this server by",
    )
    add("--token-file", help="bearer token; or ROLLSTORE_SERVER_TOKEN in the environment")
    add("--engine-token-file", help="the engines' token; or ROLLSTORE_ENGINE_TOKEN")
    add("--no-token", action="store_true", help="be reached from other hosts without a token")
    add("--timeout", type=_seconds, default=1800.0, help="for one reply of an engine (1800 s)")
    add("--connect-timeout", type=_seconds, default=5.0, help="(5 s)")
    add("--retries", type=_count, default=2, help="of a call that an engine failed (2)")
    add("--full-timeout", type=_seconds, default=60.0, help="wait at capacity (60 s)")
    add("--drain", type=_seconds, default=60.0, help="for running calls at SIGTERM (60 s)")
    add("--body-limit", type=_size, default=64 * MIB, help="of a request (64M)")
    add("--reply-limit", type=_size, default=1024 * MIB, help="of an engine's reply (1G)")
    add("--threads", type=_count, default=2, help="that decode and store (2)")
    add("--log-calls", action="store_true", help="a line for each call on standard error")
    return parser
