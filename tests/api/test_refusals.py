"""Impossible requests are refused by the name of the field, in every API."""

import io

import pytest
from chat import chat, data_url
from clips import clip

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHATS, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HI = [{"role": "user", "content": "Hi"}]
BODIES = {
    CHATS: {**chat("x"), "max_tokens": 1},
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": HI, "max_tokens": 1},
}
WEATHER = {"type": "function", "function": {"name": "get_weather"}}


def schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "address", "schema": schema}}}


def part(part):
    return [{"role": "user", "content": [part]}]


def sampled(processor, **video):
    """A video and how its frames are to be sampled."""
    shown = {"type": "video_url", "video_url": {"url": data_url(clip(7, 60), "video/mp4")}}
    return {"messages": part(shown), "mm_processor_kwargs": processor, "media_io_kwargs": {"video": video}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"logit_bias": {"999999": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias.x"),
        (COMPLETIONS, {"logit_bias": {"5": 101}}, "logit_bias"),
        (COMPLETIONS, {"allowed_token_ids": [999999]}, "allowed_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt"),
        (CHATS, {"continue_final_message": True}, "continue_final_message"),
        (CHATS, {"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs.colour"),
        (CHATS, {"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs.tokenize"),
        (CHATS, {"chat_template": "{{ x }}"}, "chat_template"),
        (CHATS, schema({"type": "zebra"}), "response_format.json_schema.schema"),
        (CHATS, schema({"$ref": "http://x/y"}), "response_format.json_schema.schema"),
        (CHATS, {"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
        (CHATS, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (CHATS, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        (CHATS, {"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        (CHATS, {"tools": [WEATHER, WEATHER]}, "tools"),
        (
            CHATS,
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        (CHATS, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            CHATS,
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (CHATS, sampled({"fps": 1, "num_frames": 4}), "mm_processor_kwargs"),
        (CHATS, sampled({}, fps=0), "media_io_kwargs.video.fps"),
        (CHATS, sampled({"do_sample_frames": False, "max_frames": 4}), "mm_processor_kwargs"),
        (CHATS, sampled({"do_sample_frames": True}, num_frames=4), "mm_processor_kwargs.do_sample_frames"),
        (CHATS, sampled({"min_pixels": 1}), "mm_processor_kwargs"),
        (RESPONSES, {"store": True}, "store"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content"),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
        (RESPONSES, {"input": part({"type": "input_image"})}, "input[0].content[0].image_url"),
        (RESPONSES, {"input": [{"type": "web_search_call"}]}, "input[0].type"),
        (RESPONSES, {"top_logprobs": 2}, "top_logprobs"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "zebra"}}}},
            "text.format.schema",
        ),
        (RESPONSES, {"max_tokens": 3}, "max_tokens"),
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        (MESSAGES, {"messages": part({"type": "document"})}, "messages[0].content[0].type"),
        (MESSAGES, {"messages": part({"type": "image"})}, "messages[0].content[0].source"),
        (MESSAGES, {"stop_sequence": "x"}, "stop_sequence"),
        (MESSAGES, {"output_config": {"format": {"schema": 5}}}, "output_config.format.schema"),
        (MESSAGES, {"output_config": {"format": {"schema": {"type": "zebra"}}}}, "output_config.format.schema"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "colour": 1}, "colour"),
        ("/tokenize", {"messages": [{**HI[0], "audio": {"id": "y"}}]}, "messages[0].audio"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_a_wrong_field_is_named(api, path, fields, param):
    status, answer = await api.post(path, {**BODIES.get(path, {}), **fields})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert "response_format" not in answer["error"]["message"] or path == CHATS, "the name of another API's field"


async def test_a_video_needs_enough_frames(api):
    """E says it of the video, P of the prompt, whoever is first."""
    status, answer = await api.post(CHATS, sampled({}, num_frames=1))
    assert status == 400, answer


@pytest.mark.parametrize(
    ("path", "fields", "meant"),
    [
        (CHATS, {"temprature": 1}, "temperature"),
        (CHATS, {"response-format": {}}, "response_format"),
        (CHATS, {"stream": True, "stream_options": {"include_usages": True}}, "include_usage"),
        (CHATS, {"tools": [{"type": "function", "function": {"name": "x", "params": 1}}]}, "parameters"),
        (COMPLETIONS, {"max_token": 1}, "max_tokens"),
        (RESPONSES, {"max_output_token": 1}, "max_output_tokens"),
        ("/tokenize", {"promt": "x"}, "prompt"),
    ],
)
async def test_a_misspelt_field_is_told_what_was_meant(api, path, fields, meant):
    status, answer = await api.post(path, {**BODIES.get(path, {}), **fields})
    assert status == 400 and answer["error"]["message"].endswith(f"did you mean {meant!r}?"), answer


@pytest.mark.parametrize(
    "sound",
    [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
    ],
)
async def test_a_model_for_pictures_refuses_sounds_by_name(api, sound):
    status, answer = await api.post(CHATS, {"messages": part(sound)})
    assert (status, answer["error"]["code"]) == (400, "unsupported_media")
    assert answer["error"]["param"].startswith("messages[0].content[0].")


async def test_a_model_for_pictures_transcribes_nothing(api):
    async with api.session.post(
        api.url + "/v1/audio/transcriptions", data={"file": io.BytesIO(b"RIFF")}
    ) as answer:
        status, error = answer.status, (await answer.json())["error"]
    assert (status, error["code"], error["param"]) == (400, "unsupported_media", "file")
