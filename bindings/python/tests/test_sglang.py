"""The request to the engine: what is set, filled, dropped and refused, line by line."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path
from types import MappingProxyType

import pytest

from rollstore.sglang import RequestRefused, training_request

DATA = Path(__file__).parents[3] / "tests" / "data"
FLAT = "return_flat_raw_output_top_logprobs"
B64 = "return_flat_raw_top_logprobs_b64"
OTHER_B64 = "return_flat_raw_output_top_logprobs_b64"
MESSAGES = [{"role": "user", "content": "hello"}]
ENDPOINTS = ("chat", "generate")
MODES = ("selected", "support")


def ask(request, endpoint="chat", mode="selected", k=8, **settings):
    """A training request at temperature 0.8; in support mode top_p 0.9 and top_k 5."""
    if mode == "support":
        settings = {"top_p": 0.9, "top_k": 5} | settings
    return training_request(
        request, k, mode=mode, endpoint=endpoint, **({"temperature": 0.8} | settings)
    )


def placed(fields, endpoint):
    """A request with these sampling settings where the endpoint keeps them."""
    if endpoint == "chat":
        return {"messages": MESSAGES, **fields}
    return {"input_ids": [1, 2], "sampling_params": dict(fields)}


def sampling_of(request, endpoint):
    return request if endpoint == "chat" else request["sampling_params"]


# --- fields that are set, filled and dropped -----------------------------------------------------

FILLED = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
FILLED_SUPPORT = {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.0}


def test_selected_chat_request():
    assert ask({"messages": MESSAGES, "max_tokens": 9}) == {
        "messages": MESSAGES,
        "max_tokens": 9,
        "logprobs": True,
        "top_logprobs": 8,
        FLAT: True,
        B64: True,
        "return_meta_info": True,
        **FILLED,
    }


def test_selected_generate_request():
    request = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 9}}
    assert ask(request, "generate") == {
        "input_ids": [1, 2],
        "return_logprob": True,
        "top_logprobs_num": 8,
        "sampling_params": {"max_new_tokens": 9, **FILLED},
    }


def test_support_chat_request():
    assert ask({"messages": MESSAGES}, mode="support") == {
        "messages": MESSAGES,
        "logprobs": True,
        "return_meta_info": True,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "support",
        **FILLED_SUPPORT,
    }


def test_support_generate_request():
    assert ask({"text": "hello"}, "generate", "support") == {
        "text": "hello",
        "return_logprob": True,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "support",
        "sampling_params": FILLED_SUPPORT,
    }


CLIENTS_OWN = {
    "logprobs": False,
    "top_logprobs": 3,
    "top_logprobs_num": 3,
    "return_logprob": False,
    "return_meta_info": False,
    "return_sampling_mask": False,
    "sampling_logprobs_mode": "selected",
    FLAT: False,
    B64: False,
    OTHER_B64: True,
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("mode", MODES)
def test_owned_fields_are_overwritten_or_dropped(mode, endpoint):
    """Whatever the client sent for an owned field, the result is as if it had not."""
    request = placed({}, endpoint)
    clean = ask(request, endpoint, mode)
    sent = ask({**request, **CLIENTS_OWN}, endpoint, mode)
    # These belong to the other endpoint or mode, which does not read them.
    left_alone = {
        ("selected", "chat"): {"top_logprobs_num", "return_logprob", "return_sampling_mask"},
        ("selected", "generate"): {
            "logprobs",
            "top_logprobs",
            "return_meta_info",
            "return_sampling_mask",
        },
        ("support", "chat"): {"return_logprob"},
        ("support", "generate"): {"logprobs", "return_meta_info"},
    }[mode, endpoint]
    assert sent == clean | {name: CLIENTS_OWN[name] for name in left_alone}


def test_base64_flag_has_the_name_that_a_setting_gives():
    request = {B64: True, OTHER_B64: True}
    out = ask(request, b64_flag=OTHER_B64)
    assert out[OTHER_B64] is True
    assert B64 not in out
    out = ask({**request, "third_b64": False}, b64_flag="third_b64")
    assert out["third_b64"] is True
    assert B64 not in out
    assert OTHER_B64 not in out
    assert "third_b64" not in ask({"third_b64": 1}, "generate", b64_flag="third_b64")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_null_is_left_out(endpoint):
    sent = {"temperature": None, "top_p": None, "top_k": None, "min_p": None}
    sent |= {"tools": None, "logit_bias": None, "regex": None, "best_of": None}
    sampling = sampling_of(ask(placed(sent, endpoint), endpoint), endpoint)
    assert {name: sampling[name] for name in FILLED} == FILLED


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_the_client_sent_and_is_right_stays_as_it_is(endpoint):
    sent = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}
    out = ask(placed(sent, endpoint), endpoint, temperature=1.0)
    assert {name: type(sampling_of(out, endpoint)[name]) for name in sent} == dict.fromkeys(
        sent, int
    )
    # In support mode the client's own filter is recorded, so it may differ from the settings.
    sent = {"temperature": 0.8, "top_p": 0.5, "top_k": 8, "min_p": 0.0}
    sampling = sampling_of(ask(placed(sent, endpoint), endpoint, "support"), endpoint)
    assert {name: sampling[name] for name in sent} == sent


def test_generate_sampling_params_absent_null_or_a_batch():
    assert ask({"text": "a"}, "generate")["sampling_params"] == FILLED
    assert ask({"text": "a", "sampling_params": None}, "generate")["sampling_params"] == FILLED
    batch = {"text": ["a", "b"], "sampling_params": [{"stop": "x"}, {"temperature": 0.8}]}
    out = ask(batch, "generate")
    assert out["sampling_params"] == [{"stop": "x", **FILLED}, FILLED]
    with pytest.raises(RequestRefused, match=r"^sampling_params\[1\]\.top_p: "):
        ask({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 0.5}]}, "generate")


@pytest.mark.parametrize("value", ["{}", 3, True, [], [{}, None], [{}, "x"]])
def test_generate_sampling_params_that_are_no_objects(value):
    with pytest.raises(RequestRefused, match=r"^sampling_params"):
        ask({"text": "a", "sampling_params": value}, "generate")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left_alone", [{"k": 0}, {"evaluation": True}])
def test_no_candidates_and_evaluation_leave_the_request_as_it_is(left_alone, mode, endpoint):
    request = placed({"temperature": 0, "top_p": 0.3, "regex": "a+", "n": 4}, endpoint)
    request |= CLIENTS_OWN
    before = copy.deepcopy(request)
    out = ask(request, endpoint, mode, **left_alone)
    assert out == before
    assert out is not request


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("mode", MODES)
def test_the_clients_request_is_not_modified(mode, endpoint):
    request = placed({"max_tokens": 3}, endpoint) | CLIENTS_OWN | {"tools": [{"function": {}}]}
    before = copy.deepcopy(request)
    ask(MappingProxyType(request), endpoint, mode)
    assert request == before
    batch = {"sampling_params": [{"stop": "x"}]}
    ask(batch, "generate", mode)
    assert batch == {"sampling_params": [{"stop": "x"}]}


def test_recorded_sessions_are_already_as_asked():
    """A request of the sample sessions was asked for once; asking again changes nothing."""
    with (DATA / "sessions.jsonl").open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    requests = [record["request"] for record in records if "request" in record]
    assert len(requests) == 84
    for request in requests:
        again = training_request(request, request["top_logprobs"], temperature=0.8)
        assert again == request


# --- what is refused -----------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
NOT_NUMBERS = (True, False, "0", "1", [], {}, math.nan)

# Field, values that pass, values that are refused; in both modes and on both endpoints.
TABLE = [
    (
        "temperature",
        [0.8],
        [
            0,
            0.0,
            -0.8,
            1,
            1.0,
            0.80001,
            math.inf,
            -math.inf,
            10**400,
            10**5000,
            "0.8",
            *NOT_NUMBERS,
        ],
    ),
    ("min_p", [0, 0.0, -0.0], [0.01, 1, -0.1, "0", True, False, math.nan]),
    ("presence_penalty", [0, 0.0], [0.1, -2, 1, math.inf, *NOT_NUMBERS]),
    ("frequency_penalty", [0, 0.0], [0.1, -2, 1, math.inf, *NOT_NUMBERS]),
    ("repetition_penalty", [1, 1.0], [0, 1.1, 0.9, math.inf, *NOT_NUMBERS]),
    ("min_tokens", [0], [1, 5, -1, *NOT_NUMBERS]),
    ("min_new_tokens", [0], [1, 5, -1, *NOT_NUMBERS]),
    ("logit_bias", [{}], [{"5": 1.0}, {"5": 0}, [], [1], "", 0, False]),
    ("regex", [], ["a+", "", 0, False]),
    ("json_schema", [], ["{}", {}, {"type": "object"}, ""]),
    ("ebnf", [], ['root ::= "a"', ""]),
    ("structural_tag", [], ["{}", {}, {"structures": []}]),
    (
        "response_format",
        [{"type": "text"}, {"type": "text", "json_schema": None}],
        [
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
            {"type": "structural_tag", "structures": []},
            {"type": "text", "json_schema": {}},
            {},
            "text",
            [],
        ],
    ),
    (
        "tool_choice",
        ["auto", "none"],
        ["required", {"type": "function", "function": {"name": "f"}}, "any", {}, [], 1, True],
    ),
    (
        "tools",
        [[], [TOOL], [TOOL | {"strict": False}, TOOL | {"strict": None}]],
        [{}, "f", 1, [None], ["f"]],
    ),
    ("custom_logit_processor", [], ["processor", "", {}]),
    ("custom_params", [{}], [{"a": 1}, [], "", 0]),
    ("use_beam_search", [False], [True, 1, 0, "false"]),
    ("beam_width", [1], [2, 4, 0, *NOT_NUMBERS]),
    ("beam_size", [1], [2]),
    ("num_beams", [1], [2]),
    ("best_of", [1], [2, 0, *NOT_NUMBERS]),
]
# These also depend on the mode.
SELECTED_TABLE = [
    ("top_p", [1, 1.0], [0.9, 0.999999, 0, 1.1, 2, -1, math.inf, *NOT_NUMBERS]),
    ("top_k", [-1], [0, 1, 50, -2, -1.0, 10**400, *NOT_NUMBERS]),
]
SUPPORT_TABLE = [
    ("top_p", [1, 1.0, 0.9, 0.5, 1e-9], [0, 0.0, -0.1, 1.01, math.inf, "0.9", math.nan, True]),
    ("top_k", [1, 5, 8], [-1, 0, 9, -2, 5.0, 10**400, *NOT_NUMBERS]),
]


def rows(which):
    """Each (mode, field, value) of the tables that passes, or that is refused."""
    for modes, table in (
        (MODES, TABLE),
        (["selected"], SELECTED_TABLE),
        (["support"], SUPPORT_TABLE),
    ):
        for mode in modes:
            for field, passing, refused in table:
                for value in passing if which == "passes" else refused:
                    yield mode, field, value


def name_of(value):
    return repr(value)[:40] if not isinstance(value, int) or value < 10**20 else "huge"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(("mode", "field", "value"), list(rows("refused")), ids=name_of)
def test_refused(mode, field, value, endpoint):
    request = placed({field: value}, endpoint)
    before = copy.deepcopy(request)
    with pytest.raises(RequestRefused) as refused:
        ask(request, endpoint, mode)
    path = field if endpoint == "chat" else f"sampling_params.{field}"
    # A list of tools is refused for one of its members.
    assert refused.value.field.partition("[")[0] == path
    assert str(refused.value).startswith(path)
    assert refused.value.reason
    assert refused.value.advice
    assert request == before


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(("mode", "field", "value"), list(rows("passes")), ids=name_of)
def test_neutral_value_passes_and_stays(mode, field, value, endpoint):
    out = ask(placed({field: value}, endpoint), endpoint, mode)
    assert sampling_of(out, endpoint)[field] == value


@pytest.mark.parametrize(("mode", "field", "value"), list(rows("refused")), ids=name_of)
def test_refused_at_the_top_of_generate_too(mode, field, value):
    """The engine reads `custom_logit_processor` there, and whoever wrote the others meant them."""
    request = {"text": "a", "sampling_params": {"top_k": 3} if mode == "support" else {}}
    with pytest.raises(RequestRefused) as refused:
        ask({**request, field: value}, "generate", mode)
    assert refused.value.field.partition("[")[0] == field


@pytest.mark.parametrize(
    ("tool", "path"),
    [
        ({"type": "function", "function": {"name": "f", "strict": True}}, "function.strict"),
        ({"type": "function", "strict": True, "name": "f"}, "strict"),
        ({"type": "function", "function": {"name": "f", "strict": "false"}}, "function.strict"),
        ({"type": "function", "function": {"name": "f", "strict": 1}}, "function.strict"),
    ],
)
def test_strict_tool_is_refused(tool, path):
    with pytest.raises(RequestRefused) as refused:
        ask({"messages": MESSAGES, "tools": [TOOL, tool]})
    assert refused.value.field == f"tools[1].{path}"


def test_support_needs_a_top_k_from_somewhere():
    for endpoint in ENDPOINTS:
        with pytest.raises(RequestRefused) as refused:
            ask(placed({}, endpoint), endpoint, "support", top_k=-1)
        assert refused.value.field.endswith("top_k")
        sampling = sampling_of(
            ask(placed({"top_k": 3}, endpoint), endpoint, "support", top_k=-1), endpoint
        )
        assert sampling["top_k"] == 3


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_does_not_move_the_distribution_is_not_looked_at(endpoint):
    free = {
        "n": 4,
        "stop": ["x"],
        "max_tokens": 5,
        "max_new_tokens": 5,
        "ignore_eos": True,
        "seed": 1,
        "stream": False,
        "skip_special_tokens": False,
    }
    out = ask(placed(free, endpoint), endpoint)
    assert free.items() <= sampling_of(out, endpoint).items()


def test_refusal_says_what_why_and_what_to_do():
    with pytest.raises(RequestRefused) as refused:
        ask({"top_p": 0.9})
    assert isinstance(refused.value, ValueError)
    assert str(refused.value) == (
        "top_p: 0.9 cuts the distribution that candidates are recorded from; "
        "leave it out or send 1, or train in support mode"
    )
    # A value of any size stays out of the message, and the error crosses processes.
    with pytest.raises(RequestRefused) as refused:
        ask({"regex": "a" * 10_000})
    assert len(str(refused.value)) < 200
    again = pickle.loads(pickle.dumps(refused.value))
    assert (again.field, again.reason, again.advice) == refused.value.args
    assert str(again) == str(refused.value)


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "error"),
    [
        ("k", {"k": -1}, ValueError),
        ("k", {"k": True}, TypeError),
        ("k", {"k": 8.0}, TypeError),
        ("k", {"k": "8"}, TypeError),
        ("mode", {"mode": "flat"}, ValueError),
        ("endpoint", {"endpoint": "completions"}, ValueError),
        ("temperature", {"temperature": 0.0}, ValueError),
        ("temperature", {"temperature": -1}, ValueError),
        ("temperature", {"temperature": math.nan}, ValueError),
        ("temperature", {"temperature": math.inf}, ValueError),
        ("temperature", {"temperature": "1"}, TypeError),
        ("temperature", {"temperature": True}, TypeError),
        ("temperature", {"temperature": None}, TypeError),
        ("min_p", {"min_p": 0.1}, ValueError),
        ("top_p", {"top_p": 0.9}, ValueError),
        ("top_k", {"top_k": 5}, ValueError),
        ("top_k", {"top_k": -1.0}, TypeError),
        ("top_k", {"mode": "support", "top_k": 9}, ValueError),
        ("top_k", {"mode": "support", "top_k": 0}, ValueError),
        ("top_p", {"mode": "support", "top_p": 0.0}, ValueError),
        ("top_p", {"mode": "support", "top_p": math.nan}, ValueError),
        ("b64_flag", {"b64_flag": ""}, ValueError),
        ("b64_flag", {"b64_flag": FLAT}, ValueError),
        ("b64_flag", {"b64_flag": None}, TypeError),
    ],
)
def test_wrong_setting_is_the_callers_fault_and_named(name, settings, error):
    with pytest.raises(error, match=f"^{name}: ") as raised:
        ask({"messages": MESSAGES}, **settings)
    assert not isinstance(raised.value, RequestRefused)


@pytest.mark.parametrize("request_", [None, [], "{}", b"{}", 3])
def test_request_must_be_an_object(request_):
    with pytest.raises(TypeError, match=r"^request: "):
        ask(request_)
