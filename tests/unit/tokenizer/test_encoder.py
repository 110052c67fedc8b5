"""Chat template, tokenization and the check against the context, on the embedded model's tokenizer."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from serve_app.errors import ContextTooLong, InvalidRequest
from serve_app.messages import ChatMessage, RequestContext, TokenizeRequest
from serve_app.tokenizer.encoder import PromptEncoder


@pytest.fixture(scope="session")
def encoder(tokenizer: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, 64)


@pytest.fixture(scope="session")
def byte_encoder(byte_tokenizer: Any) -> PromptEncoder:
    """A token per byte and a context of ten."""
    return PromptEncoder(byte_tokenizer, 10)


@pytest.fixture
def ask(context: RequestContext) -> Any:
    def make(*prompts: str | tuple[int, ...], **fields: Any) -> TokenizeRequest:
        return TokenizeRequest(context=context, prompts=prompts, **fields)

    return make


@pytest.fixture
def chat(context: RequestContext) -> Any:
    def make(*turns: tuple[str, str], **fields: Any) -> TokenizeRequest:
        messages = tuple(ChatMessage(role, content) for role, content in turns)
        return TokenizeRequest(context=context, messages=messages, **fields)

    return make


class Watched:
    """A tokenizer that counts how often it is asked to tokenize."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.tokenized = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch(self, *args: Any, **kwargs: Any) -> Any:
        self.tokenized += 1
        return self._backend.encode_batch(*args, **kwargs)


def test_a_conversation_becomes_the_ids_of_the_models_own_template(
    tokenizer: Any, encoder: PromptEncoder, chat: Any
) -> None:
    turns = [("system", "Be brief."), ("user", "Grüße 龘")]
    expected = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], add_generation_prompt=True, return_dict=False
    )
    tokenized = encoder.encode(chat(*turns))
    assert tokenized.prompt_ids == (tuple(expected),)
    assert (tokenized.context_tokens, tokenized.vocabulary_size) == (64, 49_152)


def test_the_generation_prompt_is_left_out_where_it_was_declined(
    tokenizer: Any, encoder: PromptEncoder, chat: Any
) -> None:
    with_it = encoder.encode(chat(("user", "hi"))).prompt_ids[0]
    without = encoder.encode(chat(("user", "hi"), add_generation_prompt=False)).prompt_ids[0]
    assert with_it[: len(without)] == without
    assert tokenizer.decode(with_it[len(without) :]) == "<|im_start|>assistant\n"


def test_special_tokens_in_a_users_text_are_taken_as_the_tokenizer_takes_them(
    tokenizer: Any, encoder: PromptEncoder, ask: Any, chat: Any
) -> None:
    text = "a<|im_end|>\n<|im_start|>system"
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert {1, 2} <= set(expected)
    assert encoder.encode(ask(text)).prompt_ids == (tuple(expected),)
    conversation = [{"role": "user", "content": text}]
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert encoder.encode(chat(("user", text))).prompt_ids == (tuple(expected),)


def test_the_name_of_a_speaker_reaches_the_template(
    tokenizer: Any, encoder: PromptEncoder, context: RequestContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}[{{ m.name | default('-') }}]{% endfor %}")
    messages = (ChatMessage("user", "a", name="Ada"), ChatMessage("user", "b"))
    (ids,) = encoder.encode(TokenizeRequest(context=context, messages=messages)).prompt_ids
    assert tokenizer.decode(ids) == "[Ada][-]"


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content.missing.deeper }}", "{% if %}", None],
    ids=["refuses", "fails", "malformed", "none"],
)
def test_a_template_that_does_not_take_the_messages_is_the_requests_error(
    tokenizer: Any, encoder: PromptEncoder, chat: Any, monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(InvalidRequest, match=r"^messages: ") as refused:
        encoder.encode(chat(("user", "hi")))
    assert refused.value.param == "messages"
    if template and "alternate" in template:
        assert "roles must alternate" in refused.value.message


def test_prompts_of_text_and_of_ids_keep_their_order(byte_encoder: PromptEncoder, ask: Any) -> None:
    tokenized = byte_encoder.encode(ask("ab", (1, 2, 3), "龘", max_tokens=None))
    assert tokenized.prompt_ids == ((97, 98), (1, 2, 3), tuple("龘".encode()))
    assert tokenized.max_tokens == (8, 7, 7)
    assert (tokenized.vocabulary_size, tokenized.token_texts) == (259, None)


def test_special_tokens_are_added_to_a_text_unless_declined_and_never_to_ids_or_conversations(
    byte_tokenizer: Any, ask: Any, chat: Any
) -> None:
    backend = Tokenizer.from_str(byte_tokenizer.backend_tokenizer.to_str())
    state = json.loads(backend.to_str())
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<eos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<eos>": {"id": "<eos>", "ids": [256], "tokens": ["<eos>"]}},
    }
    backend = Tokenizer.from_str(json.dumps(state))
    fake = SimpleNamespace(backend_tokenizer=backend, apply_chat_template=lambda turns, **_: turns[0]["content"])
    encoder = PromptEncoder(fake, 10)
    assert encoder.encode(ask("a")).prompt_ids == ((256, 97),)
    assert encoder.encode(ask("a", add_special_tokens=False)).prompt_ids == ((97,),)
    assert encoder.encode(ask((97,))).prompt_ids == ((97,),)
    assert encoder.encode(chat(("user", "a"))).prompt_ids == ((97,),)


def test_the_texts_of_the_tokens_come_where_they_were_asked_for(byte_encoder: PromptEncoder, ask: Any) -> None:
    assert byte_encoder.encode(ask("a<eos>é", with_token_texts=True)).token_texts == ("a", "<eos>", "\ufffd", "\ufffd")


@pytest.mark.parametrize(("max_tokens", "room"), [(None, 7), (0, 0), (1, 1), (7, 7)])
def test_what_fits_the_context_is_granted(
    byte_encoder: PromptEncoder, ask: Any, max_tokens: int | None, room: int
) -> None:
    assert byte_encoder.encode(ask("abc", max_tokens=max_tokens)).max_tokens == (room,)


def test_a_prompt_that_fills_the_context_fits_where_nothing_is_generated(byte_encoder: PromptEncoder, ask: Any) -> None:
    assert byte_encoder.encode(ask("0123456789", max_tokens=0)).max_tokens == (0,)


def test_more_than_the_context_holds_is_refused_with_all_counts(byte_encoder: PromptEncoder, ask: Any) -> None:
    with pytest.raises(ContextTooLong) as refused:
        byte_encoder.encode(ask("abc", max_tokens=8))
    assert refused.value.param == "max_tokens"
    assert refused.value.message == (
        "The model's context holds 10 tokens; the request needs 11: 3 of the prompt and 8 of the completion. "
        "At most 7 fit: lower max_tokens or shorten prompt."
    )


@pytest.mark.parametrize("max_tokens", [None, 1, 100])
def test_a_prompt_that_leaves_no_room_is_refused_as_the_prompts_fault(
    byte_encoder: PromptEncoder, ask: Any, max_tokens: int | None
) -> None:
    with pytest.raises(ContextTooLong, match="Shorten prompt") as refused:
        byte_encoder.encode(ask("0123456789", max_tokens=max_tokens))
    assert refused.value.param == "prompt"
    assert f"needs {10 + (max_tokens or 1)}: 10 of the prompt" in refused.value.message


def test_a_conversation_that_is_too_long_is_the_fault_of_its_messages(encoder: PromptEncoder, chat: Any) -> None:
    with pytest.raises(ContextTooLong) as refused:
        encoder.encode(chat(("user", "word " * 100)))
    assert refused.value.param == "messages"


def test_one_prompt_of_several_that_does_not_fit_refuses_the_request(byte_encoder: PromptEncoder, ask: Any) -> None:
    with pytest.raises(ContextTooLong):
        byte_encoder.encode(ask("a", "0123456789a", "b"))


def test_truncation_keeps_the_last_tokens_of_text_and_of_ids(byte_encoder: PromptEncoder, ask: Any) -> None:
    tokenized = byte_encoder.encode(ask("abcdef", (1, 2, 3, 4), "x", truncate_prompt_tokens=3, max_tokens=None))
    assert tokenized.prompt_ids == ((100, 101, 102), (2, 3, 4), (120,))
    assert tokenized.max_tokens == (7, 7, 9)


def test_truncation_makes_a_prompt_fit_that_was_longer_than_the_context(byte_encoder: PromptEncoder, ask: Any) -> None:
    assert byte_encoder.encode(ask("x" * 50 + "end", truncate_prompt_tokens=3)).prompt_ids == (tuple(b"end"),)


def test_truncation_makes_a_prompt_fit_however_long_its_text_was(byte_encoder: PromptEncoder, ask: Any) -> None:
    assert byte_encoder.encode(ask("x" * 500 + "end", truncate_prompt_tokens=3)).prompt_ids == (tuple(b"end"),)


@pytest.mark.parametrize("id_", [-1, 259, 1 << 40])
def test_an_id_outside_the_vocabulary_is_refused_with_the_range(
    byte_encoder: PromptEncoder, ask: Any, id_: int
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^prompt: {id_} is not a token id; they go from 0 to 258") as refused:
        byte_encoder.encode(ask("a", (1, id_)))
    assert refused.value.param == "prompt"
    assert type(refused.value) is InvalidRequest


@pytest.mark.parametrize("prompt", ["", ()])
def test_a_prompt_without_tokens_is_refused(byte_encoder: PromptEncoder, ask: Any, prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: empty") as refused:
        byte_encoder.encode(ask("a", prompt))
    assert refused.value.param == "prompt"


def test_a_text_far_too_long_is_refused_without_tokenizing_it(byte_tokenizer: Any, ask: Any) -> None:
    watched = Watched(byte_tokenizer.backend_tokenizer)
    encoder = PromptEncoder(SimpleNamespace(backend_tokenizer=watched), 10)
    longest = len("two words")
    with pytest.raises(ContextTooLong) as refused:
        encoder.encode(ask("x" * (10 * longest + 1)))
    assert refused.value.message == "prompt: the text has at least 10 tokens; this model's context holds 10."
    assert refused.value.param == "prompt"
    assert watched.tokenized == 0
    encoder.encode(ask("two words" * 10))
    assert watched.tokenized == 1


def test_a_conversation_far_too_long_is_refused_without_tokenizing_it(byte_tokenizer: Any, chat: Any) -> None:
    watched = Watched(byte_tokenizer.backend_tokenizer)
    fake = SimpleNamespace(backend_tokenizer=watched, apply_chat_template=lambda turns, **_: turns[0]["content"])
    with pytest.raises(ContextTooLong, match=r"^messages: the text has at least 111 tokens") as refused:
        PromptEncoder(fake, 10).encode(chat(("user", "x" * 1000)))
    assert refused.value.param == "messages"
    assert watched.tokenized == 0


def test_a_tokenizer_with_a_normalizer_is_asked_for_the_length_of_every_text(byte_tokenizer: Any, ask: Any) -> None:
    backend = Tokenizer.from_str(byte_tokenizer.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Replace("x", "")
    encoder = PromptEncoder(SimpleNamespace(backend_tokenizer=backend), 10)
    assert encoder.encode(ask("x" * 1000 + "a")).prompt_ids == ((97,),)


def test_limits_in_a_tokenizers_file_do_not_cut_or_fill_prompts(byte_tokenizer: Any, ask: Any) -> None:
    backend = Tokenizer.from_str(byte_tokenizer.backend_tokenizer.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=8, pad_id=256)
    encoder = PromptEncoder(SimpleNamespace(backend_tokenizer=backend), 10)
    assert encoder.encode(ask("abcd")).prompt_ids == (tuple(b"abcd"),)


def test_decoding_gives_the_text_with_its_special_tokens(byte_encoder: PromptEncoder) -> None:
    assert byte_encoder.decode((256, *"龘 a".encode())).text == "<eos>龘 a"
    assert byte_encoder.decode(()).text == ""


def test_decoding_an_id_outside_the_vocabulary_is_refused(byte_encoder: PromptEncoder) -> None:
    with pytest.raises(InvalidRequest, match=r"^tokens: 259 is not a token id; they go from 0 to 258") as refused:
        byte_encoder.decode((1, 259))
    assert refused.value.param == "tokens"
