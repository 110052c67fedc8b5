"""The error tree: every class can become a response, crosses a process boundary whole, and leaks nothing."""

import asyncio
import copy
import pickle
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app import errors
from serve_app.errors import BacklogFull, ChannelLost, ConfigError, InternalError, RequestError, TokenlineError


def descendants(root: type) -> list[type]:
    """The classes of this project below `root`; those that other tests define do not count."""
    below = [one for child in root.__subclasses__() for one in (child, *descendants(child))]
    return [one for one in below if one.__module__.startswith(("serve_app.", "deployments."))]


REQUEST_ERRORS = descendants(RequestError)
every_request_error = pytest.mark.parametrize("error_class", REQUEST_ERRORS, ids=lambda one: one.__name__)


def test_every_error_that_can_reach_a_client_is_in_this_module_and_every_error_of_it_in_the_tree() -> None:
    defined = {one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, BaseException)}
    assert defined == {TokenlineError, ConfigError, ChannelLost, RequestError, *descendants(RequestError)}
    assert len(REQUEST_ERRORS) >= 14


@every_request_error
def test_every_request_error_has_a_status_a_type_a_code_and_says_whether_to_retry(
    error_class: type[RequestError],
) -> None:
    assert isinstance(error_class.status, int)
    assert 400 <= error_class.status <= 599
    assert re.fullmatch(r"[a-z_]+", error_class.type)
    assert re.fullmatch(r"[a-z_]+", error_class.code)
    assert isinstance(error_class.retryable, bool)
    assert error_class.__doc__


@every_request_error
def test_a_retry_is_advised_only_where_the_same_request_can_succeed_later(error_class: type[RequestError]) -> None:
    assert error_class.retryable == (error_class.status in (408, 429, 503, 504))


def test_every_class_has_a_code_of_its_own() -> None:
    codes = [one.code for one in REQUEST_ERRORS]
    assert len(set(codes)) == len(codes)


def test_the_drawing_in_the_module_shows_every_class_with_its_status() -> None:
    drawn = dict(re.findall(r"── (\w+)\s+(\d{3})?", errors.__doc__ or ""))
    statuses = {one.__name__: str(one.status) for one in REQUEST_ERRORS}
    assert drawn == {"ConfigError": "", "ChannelLost": "", "RequestError": ""} | statuses


@every_request_error
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_request_error_survives_pickle_with_all_fields(error_class: type[RequestError], protocol: int) -> None:
    error = error_class("what went wrong", "messages[0].content", 1.5)
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is error_class
    assert (back.message, back.param, back.retry_after_s) == ("what went wrong", "messages[0].content", 1.5)
    assert str(back) == "what went wrong"
    assert errors.body(back) == errors.body(error)


@every_request_error
def test_every_request_error_survives_pickle_without_the_optional_fields(error_class: type[RequestError]) -> None:
    back = pickle.loads(pickle.dumps(error_class("m")))
    assert (type(back), back.message, back.param, back.retry_after_s) == (error_class, "m", None, None)


@every_request_error
def test_every_request_error_survives_a_copy(error_class: type[RequestError]) -> None:
    back = copy.copy(error_class("m", "p", 2.0))
    assert (type(back), back.message, back.param, back.retry_after_s) == (error_class, "m", "p", 2.0)


@pytest.mark.parametrize("error_class", [ConfigError, ChannelLost])
def test_an_error_that_reaches_no_client_survives_pickle_with_its_sentence(error_class: type[TokenlineError]) -> None:
    back = pickle.loads(pickle.dumps(error_class("engine.replicas: too many")))
    assert type(back) is error_class
    assert str(back) == "engine.replicas: too many"


def test_an_answer_that_is_not_read_may_be_asked_for_again_and_names_the_limit() -> None:
    error = pickle.loads(pickle.dumps(BacklogFull("not read", "channel.max_backlog_items")))
    assert (error.status, error.code, error.retryable) == (503, "backlog_full", True)
    assert (error.message, error.param) == ("not read", "channel.max_backlog_items")


def test_a_lost_channel_is_for_the_handles_to_explain_and_tells_a_client_nothing() -> None:
    assert not issubclass(ChannelLost, RequestError)
    translated = errors.as_request_error(ChannelLost("the replica at 10.0.0.7"), "r-42")
    assert type(translated) is InternalError
    assert b"10.0.0.7" not in errors.body(translated)


@every_request_error
def test_every_request_error_renders_as_openais_body(error_class: type[RequestError]) -> None:
    assert msgspec.json.decode(errors.body(error_class("m", "p", 3.0))) == {
        "error": {"message": "m", "type": error_class.type, "param": "p", "code": error_class.code}
    }


def test_a_body_without_a_field_at_fault_has_a_null_param() -> None:
    assert msgspec.json.decode(errors.body(InternalError("m")))["error"]["param"] is None


@given(message=st.text(), param=st.none() | st.text())
def test_an_error_event_is_one_event_whatever_the_message_holds(message: str, param: str | None) -> None:
    error = errors.InvalidRequest(message, param)
    event = errors.sse_event(error)
    name, data, *rest = event.split(b"\n")
    assert name == b"event: error"
    assert data == b"data: " + errors.body(error)
    assert rest == [b"", b""]
    assert b"\r" not in event
    decoded = msgspec.json.decode(data.removeprefix(b"data: "))
    assert (decoded["error"]["message"], decoded["error"]["param"]) == (message, param)


@every_request_error
def test_an_error_of_the_tree_is_translated_to_itself(error_class: type[RequestError]) -> None:
    error = error_class("m")
    translated = errors.as_request_error(error, "r1")
    if error_class is errors.InternalError:  # its details, from whatever hop, stay here
        assert translated.message == "The server failed on this request. Its id is r1."
    else:
        assert translated is error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("secret"),
        KeyError("secret"),
        ConfigError("secret"),
        ChannelLost("secret"),
        TokenlineError("secret"),
        TimeoutError("secret"),
        asyncio.CancelledError("secret"),
        ExceptionGroup("secret", [errors.InvalidRequest("secret")]),
    ],
    ids=lambda one: type(one).__name__,
)
def test_anything_outside_the_tree_is_a_500_that_names_the_request_and_nothing_else(error: BaseException) -> None:
    translated = errors.as_request_error(error, "r-42")
    assert type(translated) is InternalError
    assert translated.status == 500
    assert "r-42" in translated.message
    assert b"secret" not in errors.body(translated)
    assert type(error).__name__.encode() not in errors.body(translated)


@every_request_error
def test_a_handler_of_the_root_catches_every_request_error(error_class: type[RequestError]) -> None:
    assert issubclass(error_class, TokenlineError)
    assert not issubclass(error_class, ConfigError)
