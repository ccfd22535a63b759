"""Conversations, put into the model's chat template."""

from __future__ import annotations

import shutil

import pytest
from transformers import AutoTokenizer

from kvconnect import SamplingParams
from kvconnect.errors import ConfigurationError

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no such role: ' + message.role) }}{% endif %}"
    "{{ '<' + message.role + '>' + message.content + eos_token }}"
    "{% endfor %}"
    "{% if tools %}{{ tools[0].name }}{% endif %}"
    "{% if shout %}{{ '!' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SHORT = SamplingParams(max_tokens=6)
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
HELLO_TEXT = "<system>Be brief.</s><user>Hello</s><assistant>"


@pytest.fixture(scope="module")
def chatty(llama, with_template):
    """The same model with a template."""
    return with_template(llama, TEMPLATE)


@pytest.fixture
def llm(open_llm, chatty):
    return open_llm(chatty)


def text_of(llm, output):
    """The prompt that was answered, as text with its special tokens."""
    return llm.tokenizer._decoder.decode(list(output.prompt_token_ids))


def test_messages_become_the_models_prompt(llm, chatty):
    output = llm.chat(HELLO, SHORT)[0]
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    expected = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    assert list(output.prompt_token_ids) == expected
    assert text_of(llm, output) == HELLO_TEXT
    assert output.output_token_ids == llm.generate(expected, SHORT)[0].output_token_ids


def test_several_conversations(llm):
    outputs = llm.chat([HELLO, HELLO[1:]], [SHORT, SamplingParams(max_tokens=2)])
    assert [text_of(llm, one) for one in outputs] == [HELLO_TEXT, "<user>Hello</s><assistant>"]
    assert [len(one.output_token_ids) for one in outputs] == [6, 2]


def test_the_options_of_generate(llm):
    llm.chat(HELLO, SHORT, cache_salt="a")
    assert llm.chat(HELLO, SHORT, cache_salt="b")[0].reused_device_tokens == 0
    assert llm.chat(HELLO, SHORT, cache_salt="a")[0].reused_device_tokens > 0


def test_the_options_of_the_template(llm):
    bare = llm.chat(HELLO, SHORT, add_generation_prompt=False)[0]
    assert text_of(llm, bare) == HELLO_TEXT.removesuffix("<assistant>")
    open_end = [*HELLO, {"role": "assistant", "content": "Hi th"}]
    going_on = llm.chat(open_end, SHORT, add_generation_prompt=False, continue_final_message=True)[
        0
    ]
    assert text_of(llm, going_on) == HELLO_TEXT + "Hi th"
    more = llm.chat(HELLO, SHORT, tools=[{"name": "f"}], chat_template_kwargs={"shout": True})[0]
    assert text_of(llm, more).endswith("f!<assistant>")
    other = llm.chat(HELLO, SHORT, chat_template="{{ messages[1].content }}")[0]
    assert text_of(llm, other) == "Hello"


def test_content_in_parts(llm):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    output = llm.chat([{"role": "user", "content": parts}], SHORT)[0]
    assert text_of(llm, output) == "<user>one\ntwo</s><assistant>"


def test_a_prompt_for_the_other_methods(llm):
    expected = llm.chat(HELLO, SHORT)[0]
    chunks = list(llm.stream(llm.chat_prompt(HELLO), SHORT))
    assert sum((chunk.token_ids for chunk in chunks), ()) == expected.output_token_ids


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("Hello", "messages: a list of messages is needed"),
        (HELLO[0], "messages: a list of messages is needed"),
        (None, "messages: a list of messages is needed"),
        ([], "messages: there are none"),
        (["Hello"], "this is a str"),
        ([{"content": "Hello"}], r"messages\[0\]: role=None must be a string"),
        ([{"role": "user"}], r"messages\[0\]: it has no content"),
        ([{"role": "user", "content": None}], r"messages\[0\]: it has no content"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content: a string or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "parts of type 'image_url' are not served; only text",
        ),
        ([{"role": "cat", "content": "Hello"}], "the chat template failed: no such role: cat"),
        (
            [{"role": "user", "content": "a\ud800"}],
            r"messages\[0\].content: .* half of a surrogate",
        ),
    ],
)
def test_what_is_wrong_with_messages(llm, messages, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        llm.chat(messages, SHORT)


@pytest.mark.parametrize("template", ["{{ oops", "{{ 1 // 0 }}", 5])
def test_a_template_that_is_none(llm, template):
    with pytest.raises(ConfigurationError, match="the chat template failed"):
        llm.chat(HELLO, SHORT, chat_template=template)


def test_an_unknown_argument_of_a_chat(llm):
    expected = r"LLM.chat_prompt: unknown argument 'tool'; did you mean 'tools'"
    with pytest.raises(ConfigurationError, match=expected):
        llm.chat_prompt(HELLO, tool=[])


def test_an_answer_either_goes_on_or_begins_anew(llm):
    with pytest.raises(ConfigurationError, match="needs add_generation_prompt=False"):
        llm.chat(HELLO, SHORT, continue_final_message=True)


def test_a_model_without_a_template(open_llm, llama, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(llama, directory, ignore=shutil.ignore_patterns("*.jinja"))
    llm = open_llm(directory)
    with pytest.raises(ConfigurationError, match="the model has no chat template"):
        llm.chat(HELLO)
    assert llm.chat(HELLO, SHORT, chat_template=TEMPLATE)[0].output_token_ids


def test_a_model_without_a_tokenizer(open_llm, llama, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(llama, directory, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ConfigurationError, match="a chat needs a tokenizer"):
        open_llm(directory).chat(HELLO)
