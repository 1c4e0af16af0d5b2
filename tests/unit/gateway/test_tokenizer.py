"""Prompts to ids: equal to transformers for ordinary conversations, and no user text becomes a control token."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fairlane.errors import ConfigError, FairlaneError, InvalidRequest
from fairlane.gateway.chat_template import ChatTemplate
from fairlane.gateway.tokenizer import ChatMessage, PromptEncoder, load_encoder

CHATML = (
    "{% for message in messages %}\n    {% if loop.first and message['role'] != 'system' %}\n"
    "        {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}\n    {% endif %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>"]


def build(metaspace: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=None, byte_fallback=False))
    if metaspace:  # as Llama 2: only the first run of a text gets a space put before it
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
        alphabet = [chr(code) for code in range(32, 127)] + ["▁", "\n"]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["system user assistant Be kind. the quick brown fox"] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


BYTE_LEVEL = build(metaspace=False).to_str()


@pytest.fixture(params=[False, True], ids=["byte-level", "metaspace"])
def folder(request: Any, tmp_path: Path) -> Path:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build(request.param), bos_token="<s>", eos_token="<|im_end|>", chat_template=CHATML
    )
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def encoder_of(folder: Path) -> PromptEncoder:
    encoder = load_encoder(folder)
    assert encoder is not None
    return encoder


def reference_ids(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


content = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
conversation = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), content), min_size=1, max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(conversation)
def test_chat_ids_equal_transformers(folder: Path, turns: list[tuple[str, str]]) -> None:
    ids = encoder_of(folder).encode_chat([ChatMessage(role, text) for role, text in turns])
    assert ids == reference_ids(folder, [{"role": role, "content": text} for role, text in turns])


def test_plain_prompts_equal_transformers_with_its_bos(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert encoder_of(folder).encode_prompt("the quick fox") == tokenizer("the quick fox")["input_ids"]


def special_ids(encoder: PromptEncoder) -> set[int]:
    return {encoder.tokenizer.token_to_id(text) for text in SPECIAL}


evil = st.lists(
    st.one_of(st.sampled_from([*SPECIAL, "<|im_", "start|>", "<|", "|>", "\U000f0000", "<<s>", "0"]), content), max_size=6
).map("".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(evil)
def test_no_user_text_becomes_a_control_token(folder: Path, text: str) -> None:
    encoder = encoder_of(folder)
    special = special_ids(encoder)
    ids = encoder.encode_chat([ChatMessage("user", text)])
    harmless = encoder.encode_chat([ChatMessage("user", "hi")])
    assert [i for i in ids if i in special] == [i for i in harmless if i in special]
    assert [i for i in encoder.encode_prompt(text) if i in special] == [encoder.tokenizer.token_to_id("<s>")]


@settings(max_examples=60, deadline=None)
@given(evil)
def test_disarmed_user_text_still_reads_as_written(text: str) -> None:
    template = ChatTemplate(CHATML, {})
    encoder = PromptEncoder(BYTE_LEVEL, template)
    ids = encoder.encode_chat([ChatMessage("user", text)])
    expected = template.render([{"role": "user", "content": text}])
    assert encoder.tokenizer.decode(ids, skip_special_tokens=False) == expected


SMOLLM = Path.home() / ".cache/fairlane/models/SmolLM2-135M-Instruct"
CHATS = [
    [("user", "What is the capital of France? Answer in one sentence.")],
    [("system", "Be brief."), ("user", " naïve 😀\n\n tabs\tand  spaces ")],
    [("user", "a"), ("assistant", "b"), ("user", "c")],
]


@pytest.mark.parametrize("turns", CHATS if (SMOLLM / "tokenizer.json").exists() else [])
def test_chat_ids_equal_transformers_for_the_embedded_model(turns: list[tuple[str, str]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM)
    messages = [{"role": role, "content": text} for role, text in turns]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert encoder_of(SMOLLM).encode_chat([ChatMessage(role, text) for role, text in turns]) == expected


def test_a_template_may_use_what_transformers_offers() -> None:
    source = (
        "{{ bos_token }}{{ strftime_now('%Y') }}{{ {'a': '<é>'} | tojson }}"
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"}, lambda: datetime(2026, 5, 4))
    assert template.render([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]) == '<s>2026{"a": "<é>"}x'


def test_a_template_that_refuses_is_an_invalid_request_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render([{"role": "user", "content": "secret"}])
    assert [violation.field for violation in caught.value.violations] == ["messages"]


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content.missing.more }}", "{{ messages[0].content + 1 }}", "{{ ''.__class__.__mro__ }}{{ x.y }}"]
)
def test_a_template_that_fails_never_quotes_the_conversation(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequest) as caught:
        template.render([{"role": "user", "content": "secret"}])
    assert "secret" not in caught.value.message


def test_without_a_template_a_conversation_is_refused_and_a_prompt_is_not() -> None:
    encoder = PromptEncoder(build(metaspace=False).to_str())
    with pytest.raises(FairlaneError) as caught:
        encoder.encode_chat([ChatMessage("user", "x")])
    assert caught.value.reason == "NO_CHAT_TEMPLATE"
    assert len(encoder.encode_prompt("x")) == 2


def test_a_training_time_truncation_never_cuts_a_prompt() -> None:
    tokenizer = build(metaspace=False)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert len(PromptEncoder(tokenizer.to_str()).encode_prompt("zyxwvutsrq")) == 11


def test_a_folder_without_a_tokenizer_has_none_and_a_broken_one_is_a_config_error(tmp_path: Path) -> None:
    assert load_encoder(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_encoder(tmp_path)


def test_chat_template_jinja_wins_and_of_several_named_ones_default_is_taken(tmp_path: Path) -> None:
    build(metaspace=False).save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "one"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chat = [ChatMessage("user", "x")]
    first = encoder_of(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("two")
    second = encoder_of(tmp_path)
    texts = [encoder.tokenizer.decode(encoder.encode_chat(chat)) for encoder in (first, second)]
    assert texts == ["one", "two"]


def test_a_template_with_a_syntax_error_is_a_config_error(tmp_path: Path) -> None:
    build(metaspace=False).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="chat template, line 1"):
        load_encoder(tmp_path)


@pytest.mark.parametrize("length", [10, 400, 4000])
def test_a_text_far_over_the_limit_is_counted_to_the_limit_and_no_further(folder: Path, length: int) -> None:
    """Limit 20: 400 characters of short words are more than 20 tokens and within 8 characters a token of 50; 4,000 are not."""
    encoder = encoder_of(folder)
    text = "the quick fox " * (length // 14 + 1)
    whole = encoder.encode_prompt(text)
    for limit in (20, 50, 100_000):
        counted = encoder.encode_prompt(text, limit)
        far_over = len(text) > 8 * limit
        assert len(counted) == (limit + 1 if far_over else len(whole))
        assert (len(counted) > limit) == (len(whole) > limit)


def test_a_long_text_of_few_tokens_is_not_judged_by_its_length(folder: Path) -> None:
    encoder = encoder_of(folder)
    text = "assistant " * 200  # one or two tokens for ten characters
    whole = encoder.encode_prompt(text)
    assert encoder.encode_prompt(text, len(whole)) == whole


def test_a_message_far_over_the_limit_is_counted_to_the_limit(folder: Path) -> None:
    messages = [ChatMessage("system", "Be kind."), ChatMessage("user", "fox " * 5000)]
    assert len(encoder_of(folder).encode_chat(messages, 100)) == 101
