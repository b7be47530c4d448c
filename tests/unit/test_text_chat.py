"""Chat templates: what a conversation becomes, and how a session's log is continued."""

import asyncio
import gc
import inspect
import json
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from outrider.errors import FailedPrecondition, InvalidArgument, Unsupported
from outrider.v1 import generation_pb2, worker_pb2
from services.orchestrator import chat_template as chat_template_module
from services.orchestrator import text as text_module
from services.orchestrator.config import OrchestratorConfig
from services.orchestrator.models import ServedModel
from services.orchestrator.service import GenerationServicer
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


# --- templates that would not end ---------------------------------------------------------------

FOR_EVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (FOR_EVER, "within 0.6 s"),
        ("{% set n = messages | length * 10 ** 8 %}{{ (3 ** n) % 10 }}", "within 0.6 s"),
        ("{% set n = messages | length %}{{ 'x' * (10 ** 10 * n) }}", "MemoryError"),
        ("{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "16777216 characters"),
    ],
    ids=["loops", "one long operation", "memory", "text"],
)
def test_a_template_has_little_time_memory_and_text(
    monkeypatch: pytest.MonkeyPatch, template: str, why: str
) -> None:
    monkeypatch.setattr(chat_template_module, "TIME_LIMIT_S", 0.6)
    bad = "{% if messages[0].role == 'bad' %}" + template + "{% endif %}fine"
    tokenizer = load(bad)
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(Unsupported, match=why):
            tokenizer.render_chat([("bad", "")])
        assert time.monotonic() - started < 4
        if "within" in why:  # It ended by itself; that it would be killed is for worse.
            assert tokenizer._chat_template._child._process.returncode == -signal.SIGALRM
        # Others are served, by a new process if need be.
        assert show(tokenizer, tokenizer.render_chat([("user", "")])) == "fine"


def test_a_template_that_does_not_end_even_when_it_is_compiled_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template_module, "TIME_LIMIT_S", 0.6)
    with pytest.raises(FailedPrecondition, match="cannot be compiled"):
        load("{{ 3 ** (10 ** 8) % 10 }}")


def test_a_renderer_that_died_is_replaced() -> None:
    tokenizer = load(CHATML)
    expected = tokenizer.render_chat([("user", "Hi")])
    template = tokenizer._chat_template
    template._child._process.kill()
    template._child._process.wait()
    assert tokenizer.render_chat([("user", "Hi")]) == expected
    os.kill(template._child._process.pid, signal.SIGSTOP)  # neither dead nor answering
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patched:
        patched.setattr(chat_template_module, "TIME_LIMIT_S", 0.2)
        patched.setattr(chat_template_module, "_GRACE_S", 0.1)
        with pytest.raises(Unsupported, match=r"within 0\.2 s"):
            tokenizer.render_chat([("user", "x" * 200_000)])
    assert tokenizer.render_chat([("user", "Hi")]) == expected


def test_the_renderer_has_no_secret_and_ends_with_its_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTRIDER_ORCHESTRATOR_STORE_URL", "redis://:sesame@host")
    tokenizer = load(CHATML)
    process = psutil.Process(tokenizer._chat_template._child._process.pid)
    assert "sesame" not in str(process.environ()) and "-I" in process.cmdline()
    assert [f for f in process.open_files() if "outrider" in f.path] == []
    del tokenizer
    gc.collect()
    process.wait(10)


async def test_a_slow_template_or_a_long_text_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What tokenises a prompt runs beside the event loop."""
    monkeypatch.setattr(chat_template_module, "TIME_LIMIT_S", 1.2)
    model = ServedModel("m", worker_pb2.InfoResponse(vocab_size=300), load(FOR_EVER))
    parts: dict[str, Any] = dict.fromkeys(inspect.signature(GenerationServicer).parameters)
    parts["registry"] = SimpleNamespace(model=lambda name: model)
    servicer = GenerationServicer(**parts | {"config": OrchestratorConfig(), "owner": "me"})
    context: Any = SimpleNamespace(abort=_raise_abort)
    slow = generation_pb2.TokenizeRequest()
    slow.prompt.add().chat.messages.add(role="user", content="x")
    long = generation_pb2.TokenizeRequest()
    for _ in range(3):
        long.prompt.add(text="long text " * 50_000)
    gaps = []

    async def tick() -> None:
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            await asyncio.sleep(0.005)
            gaps.append(loop.time() - before)
            before = loop.time()

    ticking = asyncio.create_task(tick())
    started = time.monotonic()
    refused, tokens = await asyncio.gather(
        servicer.Tokenize(slow, context), servicer.Tokenize(long, context), return_exceptions=True
    )
    ticking.cancel()
    assert "within 1.2 s" in str(refused) and len(tokens.token_ids) > 1_000_000  # type: ignore[union-attr]
    # It takes long, and the loop goes round all the while.
    assert time.monotonic() - started > 1 and max(gaps) < 0.8


async def _raise_abort(code: object, message: str, metadata: object) -> None:
    raise RuntimeError(message)
