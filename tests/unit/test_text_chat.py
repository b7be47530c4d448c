"""Chat templates: what a conversation becomes, and how a session's log is continued."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from outrider.errors import FailedPrecondition, InvalidArgument, Unsupported
from services.orchestrator import text as text_module
from services.orchestrator.text import ChatTokenizer

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A space before the end of turn; a system prompt inside the first user's turn.
INST = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# What ends the text differs from what ends a turn.
END_OF_TEXT = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]


def tokenizer_json() -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    return str(tokenizer.to_str())


TOKENIZER = tokenizer_json()


def load(template: str | None, **specials: str | None) -> ChatTokenizer:
    document = {"tokenizer": TOKENIZER, "chat_template": template, **specials}
    return ChatTokenizer.from_json(json.dumps(document).encode())


def show(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    """Text with the special tokens in it."""
    return str(tokenizer._tokenizer.decode(ids, skip_special_tokens=False))


def special(tokenizer: ChatTokenizer, token: str) -> int:
    return int(tokenizer._tokenizer.token_to_id(token))


def test_text_is_encoded_whole_with_the_start_token_unless_it_goes_on() -> None:
    tokenizer = load(None)
    assert show(tokenizer, tokenizer.encode("Hello there")) == "<s>Hello there"
    ids = tokenizer.encode("Hello there", add_special_tokens=False)
    assert show(tokenizer, ids) == "Hello there"
    assert tokenizer.decode([special(tokenizer, "<s>"), *ids]) == "Hello there"
    assert tokenizer.vocab_size == 260


def test_decode_tidies_nothing() -> None:
    tokenizer = load(None)
    text = " Hi , it 's  me . \n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_conversation_is_rendered_up_to_the_reply() -> None:
    tokenizer = load(CHATML)
    ids = tokenizer.render_chat([("system", "Be brief."), ("user", "Hi")])
    assert show(tokenizer, ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.render_chat([("user", "Hi")])
    assert show(tokenizer, ids).startswith("<|im_start|>system\nYou are helpful.<|im_end|>\n")


def test_the_start_token_comes_from_the_template_alone() -> None:
    tokenizer = load(INST, bos_token="<s>", eos_token="</s>")
    ids = tokenizer.render_chat([("system", "S. "), ("user", "Hi")])
    assert show(tokenizer, ids) == "<s>[INST] S. Hi [/INST]"


def test_a_continuation_closes_the_turn_that_was_cut_short() -> None:
    tokenizer = load(CHATML)
    expected = "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    for last_token in (None, 7):
        ids = tokenizer.render_continuation([("user", "More")], last_token)
        assert show(tokenizer, ids) == expected


def test_a_continuation_does_not_end_a_turn_twice() -> None:
    tokenizer = load(CHATML)
    ids = tokenizer.render_continuation([("user", "More")], special(tokenizer, "<|im_end|>"))
    assert show(tokenizer, ids) == "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"


def test_another_special_token_at_the_end_still_gets_an_end_of_turn() -> None:
    tokenizer = load(CHATML)
    ids = tokenizer.render_continuation([("user", "More")], special(tokenizer, "</s>"))
    assert show(tokenizer, ids).startswith("<|im_end|>\n<|im_start|>user")


def test_white_space_before_the_end_of_turn_goes_with_it() -> None:
    tokenizer = load(INST, bos_token="<s>", eos_token="</s>")
    more = [("user", "More")]
    end = special(tokenizer, "</s>")
    assert show(tokenizer, tokenizer.render_continuation(more, 7)) == " </s><s>[INST] More [/INST]"
    assert show(tokenizer, tokenizer.render_continuation(more, end)) == "<s>[INST] More [/INST]"


def test_a_log_and_its_continuation_are_what_the_whole_conversation_renders() -> None:
    for template in (CHATML, INST, END_OF_TEXT):
        tokenizer = load(template, bos_token="<s>", eos_token="</s>")
        first = [("user", "Hi"), ("assistant", "Hello you")]
        more = [("user", "Who?"), ("assistant", "Me"), ("user", "Ah")]
        log = tokenizer.render_chat(first[:1])
        log += tokenizer.encode(
            " Hello you" if template is INST else "Hello you", add_special_tokens=False
        )
        whole = log + tokenizer.render_continuation(more, log[-1])
        assert whole == tokenizer.render_chat([*first, *more])
        end = special(tokenizer, "</s>" if template is INST else "<|im_end|>")
        log += tokenizer.encode(" ", add_special_tokens=False) if template is INST else []
        log.append(end)
        assert log + tokenizer.render_continuation(more, end) == whole


def test_a_message_that_looks_like_the_dummy_reply_is_kept() -> None:
    tokenizer = load(CHATML)
    ids = tokenizer.render_continuation([("user", "outrider reply 0 outrider reply 1")], None)
    assert "user\noutrider reply 0 outrider reply 1<|im_end|>" in show(tokenizer, ids)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{{ loop.index ~ m.content }};{% endfor %}", "depends on earlier"),
        ("{% for m in messages %}{{ m.content | upper }};{% endfor %}", "as it is"),
        ("{% for m in messages %}{{ m.content ~ m.content }};{% endfor %}", "as it is"),
        ("{{ messages[-1].content }}", "as it is"),
        ("{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}", "no plain"),
    ],
    ids=["numbers", "rewrites", "repeats", "forgets", "single turn"],
)
def test_a_template_that_cannot_continue_a_session_is_unsupported(template: str, why: str) -> None:
    with pytest.raises(Unsupported, match=f"cannot continue a session.*{why}"):
        load(template).render_continuation([("user", "More")], None)


def test_messages_that_the_template_refuses_are_an_invalid_argument() -> None:
    tokenizer = load(INST, bos_token="<s>", eos_token="</s>")
    wrong = [("user", "a"), ("user", "b")]
    with pytest.raises(InvalidArgument, match="roles must alternate"):
        tokenizer.render_chat(wrong)
    with pytest.raises(InvalidArgument, match="roles must alternate"):
        tokenizer.render_continuation(wrong, None)


def test_no_messages_are_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="at least one message"):
        load(CHATML).render_chat([])
    with pytest.raises(InvalidArgument, match="at least one message"):
        load(CHATML).render_continuation([], None)


def test_a_model_without_template_says_so() -> None:
    assert not load(None).has_chat_template
    with pytest.raises(Unsupported, match="no chat template"):
        load(None).render_chat([("user", "Hi")])


def test_templates_have_what_transformers_gives_them() -> None:
    template = (
        "{% for m in messages %}\n"
        "    {% if m.role == 'skip' %}\n"
        "        {% continue %}\n"
        "    {% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}{{ tools is none }}{{ bos_token is defined }}"
    )
    tokenizer = load(template)
    ids = tokenizer.render_chat([("skip", "x"), ("user", "<é'>")])
    assert show(tokenizer, ids) == '{"role": "user", "content": "<é\'>"}4TrueFalse'


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'].x }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_misbehaves_is_stopped(template: str) -> None:
    with pytest.raises(Unsupported, match="chat template fails"):
        load(template).render_chat([("user", "Hi")])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff{}", "no UTF-8 JSON"),
        (b"{", "no UTF-8 JSON"),
        (b"[" * 100_000, "no UTF-8 JSON"),
        (b"[]", "no JSON object"),
        (b"{}", "no object or string"),
        (b'{"tokenizer": 5}', "no object or string"),
        (b'{"tokenizer": "{}"}', "cannot be loaded"),
        (b'{"tokenizer": {"model": {"type": "What"}}}', "cannot be loaded"),
        (b'{"tokenizer": {}, "chat_template": 7}', "chat_template"),
        (b'{"tokenizer": {}, "bos_token": {"content": "a"}}', "bos_token"),
    ],
)
def test_a_malformed_document_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(FailedPrecondition, match=why):
        ChatTokenizer.from_json(data)


def test_a_template_that_does_not_compile_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match="cannot be compiled"):
        load("{% for %}")


def test_a_document_or_template_over_its_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FailedPrecondition, match="at most 1048576"):
        load("x" * (1 << 20) + "x")
    monkeypatch.setattr(text_module, "MAX_DOCUMENT_BYTES", 100)
    with pytest.raises(FailedPrecondition, match="at most 100"):
        load(None)


def test_a_tokenizer_may_come_as_an_object_or_a_string() -> None:
    document = {"tokenizer": json.loads(TOKENIZER), "chat_template": None}
    as_object = ChatTokenizer.from_json(json.dumps(document).encode())
    assert as_object.encode("é") == load(None).encode("é")


def test_text_that_is_no_unicode_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="not valid Unicode"):
        load(None).encode("a\ud800")
