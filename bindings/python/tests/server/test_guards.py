"""What is checked before a request is looked at; metrics; health."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from lab import WORDS, Lab, run

from rollstore.server.settings import parse

PATH = ["--store", "/dev/shm/x", "--engine", "http://127.0.0.1:1/"]


def test_bodies_have_a_limit(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, body_limit=10_000) as lab:
            session = await lab.open()
            answer = await lab.chat(session, user="x" * 10_000)
            assert (answer.status, answer.error["code"]) == (413, "body_limit")
            answer = await lab.end(session, status="x" * 9_000)
            assert answer.status == 400
            answer = await lab.end(session, status="x" * 20_000)
            assert (answer.status, answer.error["code"]) == (413, "body_limit")
            assert lab.engine.seen == []

    run(main)


def test_requests_about_a_session_are_short(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            answer = await lab.end(session, status="x" * 70_000)
            assert (answer.status, answer.error["code"]) == (413, "body_limit")

    run(main)


def test_replies_have_a_limit(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, reply_limit=2_000) as lab:
            session = await lab.open()
            assert (await lab.chat(session, max_tokens=1)).status == 200
            answer = await lab.chat(session, max_tokens=12)
            assert (answer.status, answer.error["code"]) == (502, "reply_limit")

    run(main)


def test_only_json_is_taken(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            headers = {"Content-Type": "text/plain"}
            answer = await lab.ask("POST", "/sessions", b"{}", headers=headers)
            assert (answer.status, answer.error["code"]) == (415, "content_type")

    run(main)


def test_only_names_of_this_host_are_answered(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, allow_hosts=("agents.internal",)) as lab:
            for name in ("localhost", "127.0.0.1:99", "[::1]:5", "agents.internal:80"):
                assert (await lab.ask("GET", "/health", headers={"Host": name})).status == 200
            for name in ("example.org", "localhost.example.org:8700", "", "[::"):
                answer = await lab.ask("GET", "/health", headers={"Host": name})
                assert answer.status in (400, 421), name

    run(main)


@pytest.mark.parametrize(
    "session",
    ["..", ".", "a%20b", "a%00b", "%2e%2e%2fdata.mdb", "-x", "a%0ab", "é", "x" * 257, "a%25"],
)
def test_ids_that_are_none(path: Path, session: str) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            answer = await lab.chat(session)
            assert answer.status in (400, 404)
            assert answer.error
            answer = await lab.ask("GET", f"/sessions/{session}")
            assert answer.status in (400, 404, 405)

    run(main)


def test_nothing_else_is_served(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            for method, route in (
                ("GET", "/"),
                ("GET", "/sessions"),
                ("GET", "/data.mdb"),
                ("GET", "/server.journal"),
                ("GET", f"/sessions/{session}/../../data.mdb"),
                ("GET", f"/sessions/{session}/data.mdb"),
                ("POST", f"/sessions/{session}/v1/completions"),
                ("PUT", f"/sessions/{session}"),
            ):
                answer = await lab.ask(method, route)
                assert answer.status in (404, 405), route
                assert answer.error["message"]
            assert (await lab.ask("GET", f"/sessions/{session}/v1/models")).json["data"]
            unknown = await lab.chat("f" * 32)
            assert (unknown.status, unknown.error["code"]) == (404, "session")

    run(main)


def bearer(token: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {token}"}}


def test_a_token_guards_everything(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        caplog.set_level(logging.INFO)
        async with Lab(path, token="s3cret", engine_token="eng1ne", log_calls=True) as lab:
            good = bearer("s3cret")
            assert (await lab.ask("GET", "/health")).status == 200
            wrongs: list[dict[str, Any]] = [
                {},
                bearer("S3cret"),
                bearer(""),
                bearer("s3cre"),
                bearer("s3cret1"),
                {"headers": {"Authorization": "s3cret"}},
                {"headers": {"Authorization": "Basic s3cret"}},
            ]
            for wrong in wrongs:
                for method, route in (("GET", "/metrics"), ("POST", "/sessions"), ("GET", "/none")):
                    answer = await lab.ask(method, route, **wrong)
                    assert (answer.status, answer.error["code"]) == (401, "token")
            first = (await lab.ask("POST", "/sessions", {"id": "a"}, **good)).json
            second = (await lab.ask("POST", "/sessions", {"id": "b"}, **good)).json
            assert first["api_key"] != second["api_key"]
            key = bearer(first["api_key"])
            call = "/sessions/{}/v1/chat/completions"
            assert (await lab.ask("POST", call.format("a"), WORDS, **key)).status == 200
            assert (await lab.ask("GET", "/sessions/a", **key)).status == 200
            # An agent's key opens its own calls, and neither others' nor its session's end.
            assert (await lab.ask("POST", call.format("b"), WORDS, **key)).status == 401
            for method, route in (
                ("POST", "/sessions/a/end"),
                ("DELETE", "/sessions/a"),
                ("GET", "/sessions/b"),
                ("GET", "/metrics"),
            ):
                assert (await lab.ask(method, route, **key)).status == 401
            assert (await lab.ask("POST", call.format("b"), WORDS, **good)).status == 200
            assert {h["Authorization"] for h in lab.engine.headers} == {"Bearer eng1ne"}
            assert (await lab.ask("POST", "/sessions/a/end", {}, **good)).status == 200
            assert "/sessions/a/end 200" in caplog.text
            for secret in ("s3cret", "eng1ne", first["api_key"], "please begin"):
                assert secret not in caplog.text
            assert "s3cret" not in repr(lab.settings)

    run(main)


# ---------------------------------------------------------------- looking after it


def test_metrics_tell_what_happened(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            await lab.talk(session, 2)
            await lab.chat(session, n=3)
            await lab.open()
            text = (await lab.ask("GET", "/metrics")).body.decode()
            for line in text.splitlines():
                name = line.split(" ")[2] if line.startswith("#") else line.split("{")[0]
                assert name.startswith(("rollstore_server_", "process_")), line
            metrics = await lab.metrics()
            assert metrics['calls_total{kind="training",outcome="answered"}'] == 2
            assert metrics['calls_total{kind="training",outcome="request"}'] == 1
            assert metrics['refusals_total{kind="request"}'] == 1
            assert metrics["tokens_total"] == 24
            assert metrics["open_sessions"] == 2
            assert metrics["store_turns"] == 2
            assert 0 < metrics["store_used_bytes"] <= metrics["store_capacity_bytes"]
            for name in ("decode", "commit", "engine"):
                assert metrics[f"{name}_seconds_count"] == 2
                assert metrics[f"{name}_seconds_sum"] > 0
            assert metrics["reply_bytes_total"] > metrics["answer_bytes_total"] > 0
            assert metrics["process_cpu_seconds_total"] > 0

    run(main)


def test_a_draining_server_takes_no_new_calls(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            assert lab.server is not None
            lab.server.draining = True
            assert (await lab.ask("GET", "/health")).status == 503
            for answer in (await lab.chat(session), await lab.ask("POST", "/sessions")):
                assert (answer.status, answer.error["code"]) == (503, "draining")
                assert answer.headers["Retry-After"]
            assert (await lab.end(session)).status == 200

    run(main)


# ---------------------------------------------------------------- the command line


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLSTORE_SERVER_TOKEN", raising=False)
    settings = parse([*PATH, "--engine", "http://b", "--body-limit", "2M", "--top-k", "8"])
    assert settings.engines == ("http://127.0.0.1:1", "http://b")
    assert (settings.body_limit, settings.top_k, settings.host) == (2 << 20, 8, "127.0.0.1")
    assert settings.token is None
    file = tmp_path / "token"
    file.write_text("abc\n")
    assert parse([*PATH, "--host", "0.0.0.0", "--token-file", str(file)]).token == "abc"
    monkeypatch.setenv("ROLLSTORE_SERVER_TOKEN", "env")
    assert parse(PATH).token == "env"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--host", "0.0.0.0"], "--token-file"),
        (["--engine", "ftp://x"], "http://"),
        (["--top-k", "0", "--mode", "support"], "--top-k"),
        (["--token-file", "/nonexistent"], "/nonexistent"),
        (["--top-k", "-1"], "--top-k"),
    ],
)
def test_settings_that_are_refused(
    more: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ROLLSTORE_SERVER_TOKEN", raising=False)
    with pytest.raises(SystemExit) as exit_info:
        parse([*PATH, *more])
    assert exit_info.value.code == 2
    assert said in capsys.readouterr().err


def test_errors_of_engines_have_openais_shape() -> None:
    from rollstore.server.errors import engine_refusal

    own = b'{"error":{"message":"m","type":"t","param":null,"code":"c"}}'
    assert engine_refusal(400, own).body() == own
    for body, said in (
        (b'{"object":"error","message":"too long","code":400}', "too long"),
        (b'{"detail":"none"}', "none"),
        (b"<html>bad", "<html>bad"),
        (b"", "status 500"),
        (b"[1]", "[1]"),
    ):
        error = json.loads(engine_refusal(500, body).body())["error"]
        assert said in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
