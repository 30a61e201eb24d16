"""The fields of requests: OpenAI's, and others that clients of vLLM and SGLang send.

Each field is either applied, or accepted only with values that have no effect on answers. Unknown fields are refused.
"""

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError

from fp8moe.decode.request import UNSERVED
from fp8moe.weights.source import shown

NEW_TOKENS = 1024
"""Most tokens of an answer if the request sets no limit; fewer if max_length leaves less room after the prompt."""
MOST_BODY = 32 << 20  # size limit of a request's body in bytes
MOST_PROMPTS = 128  # most prompts in one request

Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)] | None
Flag = bool | None
Off = Literal[False] | None
On = Literal[True] | None
Zero = Annotated[float, Field(ge=0, le=0)] | None
One = Annotated[float, Field(ge=1, le=1)] | None
Nothing = Annotated[dict | list, Field(max_length=0)] | None
Label = Any  # type of fields that only describe a request and change no answer
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _StreamOptions(_Checked):
    include_usage: Flag = None
    include_obfuscation: Off = None


class _Settings(_Checked):
    """Settings that a request has as fields of its own and in its generation_config."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Integer = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None


class _GenerationConfig(_Settings):
    """The settings of a request's generation_config that are applied; `Reader` refuses others by their values."""

    model_config = ConfigDict(extra="allow")

    max_new_tokens: Integer = None
    do_sample: Flag = None
    eos_token_id: Integer | list[Integer] = None
    stop_strings: Stop | list[Stop] | None = None


class _Request(_Settings):
    """The fields that completion and chat requests share."""

    model: str | None = None
    max_tokens: Integer = None
    presence_penalty: float | None = None
    seed: Integer = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Integer], Field(max_length=128)] | None = None
    ignore_eos: Flag = None
    skip_special_tokens: Flag = None
    return_routed_experts: Flag = None
    stream: Flag = None
    stream_options: _StreamOptions | None = None
    generation_config: Json[_GenerationConfig] | None = None

    frequency_penalty: Zero = None
    min_tokens: Zero = None
    n: One = None
    length_penalty: One = None
    use_beam_search: Off = None
    include_stop_str_in_output: Off = None
    spaces_between_special_tokens: On = None
    logit_bias: Nothing = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    user: Label = None
    request_id: Label = None
    priority: Label = None


class _Completion(_Request):
    prompt: Any = None
    add_special_tokens: Flag = None
    logprobs: Zero = None
    best_of: One = None
    echo: Off = None
    suffix: Annotated[str, Field(max_length=0)] | None = None


class _Text(_Checked):
    type: Literal["text", "input_text", "output_text"]
    text: str


class _Function(_Checked):
    name: str
    arguments: Json[dict] | dict = {}


class _ToolCall(_Checked):
    id: str | None = None
    type: Literal["function"] = "function"
    index: Integer = None
    function: _Function


class _Message(_Checked):
    role: str
    content: str | list[_Text] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Literal[""] | None = None
    audio: Nothing = None
    function_call: Nothing = None
    annotations: Nothing = None


class _Chat(_Request):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: Integer = None
    logprobs: Flag = None
    tools: list[dict] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    documents: list[dict] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    chat_template_kwargs: dict | None = None

    top_logprobs: Zero = None
    parallel_tool_calls: On = None
    store: Off = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    audio: Nothing = None
    functions: Nothing = None
    function_call: Literal["auto", "none"] | None = None
    metadata: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    prompt_cache_options: Label = None
    prompt_cache_retention: Label = None


SAMPLING: dict[str, tuple] = {"temperature": (), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
"""Settings that affect sampled answers but not greedy ones, each with the values that turn it off."""
_CONFIG = tuple(_GenerationConfig.model_fields)
"""Settings of a request's generation_config that are applied.

All other settings must have the value of the model's generation_config or, where that has no effect, transformers'
default value or another without effect.
"""
_SAMPLER = (*SAMPLING, "repetition_penalty", "presence_penalty", "seed", "stop", "stop_token_ids", "ignore_eos")
_SAMPLER += ("generation_config", "logprobs", "return_routed_experts")
"""Fields of requests that are refused if transformers' continuous batching serves the model."""


class UnknownModel(LookupError):
    """A request names a model that is not served."""


@dataclass
class Asked:
    """A parsed request.

    prompts: a list of tokens for each prompt. options, config: arguments of `parse_one`, the same for all prompts.
    stops: stop strings. text: the formatted chat, None for completions. usage: whether a stream ends with token counts.
    fields: the fields that the arguments of `parse_one` come from, where they have other names.
    """

    prompts: list[list[int]]
    options: dict[str, Any]
    config: Any
    stops: list[str]
    text: str | None
    tools: list[dict] | None
    stream: bool
    usage: bool
    skip_special_tokens: bool
    fields: Mapping[str, str] = field(default_factory=dict)

    def told(self, error: Exception) -> str:
        """Return the message of an error of `parse_one`, with the field's name in place of the argument's."""
        name, colon, reason = str(error).partition(":")
        return f"{self.fields.get(name, name)}{colon}{reason}"

    def new_tokens(self, max_length: int, prompt: int) -> int:
        """Return the most tokens of an answer to a prompt. prompt: the prompt's number of tokens."""
        most = self.options["max_new_tokens"]
        return max(1, min(NEW_TOKENS, max_length - prompt)) if most is None else most


class Reader:
    """Parses the bodies of requests to one model.

    max_length: most tokens of a prompt and its answer together. own_settings: whether requests may set the fields in
    `_SAMPLER`. most_bytes: size limit of a body.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, max_length: int, own_settings: bool):
        self.name = name
        self._model, self._tokenizer, self._max_length = model, tokenizer, max_length
        self._most = max_length * max(map(len, tokenizer.get_vocab()))  # the most characters max_length tokens can have
        # In JSON a character may take 12 bytes: two \uXXXX escapes.
        self.most_bytes = min(MOST_BODY, (1 << 20) + 12 * self._most)
        self._own_settings = own_settings
        self._arguments = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"kwargs"}

    def read(self, body: bytes, chat: bool) -> Asked:
        """Parse a body. Raises ValueError, naming the field, for an invalid body; UnknownModel for another model."""
        try:
            given: Any = (_Chat if chat else _Completion).model_validate_json(body)
        except ValidationError as error:
            raise ValueError(_told(error)) from None
        if given.model not in (None, self.name):
            raise UnknownModel(f"model: {shown(given.model)} is not served here; the model is {self.name!r}")
        if given.stream_options is not None and not given.stream:
            raise ValueError("stream_options: only a stream has them")
        if given.return_routed_experts and given.stream:
            raise ValueError("return_routed_experts: a stream does not have them; ask for a whole answer")
        for name in () if self._own_settings else _SAMPLER:
            if getattr(given, name):
                raise ValueError(f"{name}: this model is served with the settings of its generation_config only")
        options, config = self._options(given)
        stops = options["stop_strings"] or getattr(config, "stop_strings", None) or []
        tools = None if not chat or given.tool_choice == "none" else given.tools
        text = self._chat(given, tools) if chat else None
        return Asked(
            prompts=self._prompts(given) if text is None else [self._encode("messages", text, False)],
            options=options,
            config=config,
            stops=[stops] if isinstance(stops, str) else [*stops],
            text=text,
            tools=tools,
            stream=bool(given.stream),
            usage=bool(given.stream_options and given.stream_options.include_usage),
            skip_special_tokens=given.skip_special_tokens is not False,
            fields=_fields(given),
        )

    def _options(self, given: Any) -> tuple[dict[str, Any], Any]:
        """Return options for `parse_one`, and the generation config that supplies all settings not in the options."""
        config = copy.copy(self._model.generation_config)
        config.pad_token_id = None  # pad tokens in a prompt are ordinary tokens here
        asked = given.generation_config
        own = self._of_config({} if asked is None else asked.model_dump(exclude_unset=True), config)
        limit = getattr(given, "max_completion_tokens", None)
        limit = given.max_tokens if limit is None else limit
        options = {"max_new_tokens": own.pop("max_new_tokens", None) if limit is None else limit}
        sampling = {name: getattr(given, name) for name in SAMPLING if getattr(given, name) is not None}
        sampled = own.pop("do_sample", config.do_sample)
        if "temperature" in sampling:
            sampled = sampling["temperature"] > 0
        elif any(value not in SAMPLING[name] for name, value in sampling.items()):
            sampled = True  # as in OpenAI's API, which samples at temperature 1 if a request sets no temperature
        options["do_sample"] = bool(sampled)
        for name, off in SAMPLING.items():
            value = sampling.get(name, own.pop(name, None))
            if value in off:
                setattr(config, name, None)
            elif value is not None and sampled:
                options[name] = value
        ends = own.pop("eos_token_id", config.eos_token_id)
        ends = [] if ends is None or given.ignore_eos else ends if isinstance(ends, list) else [ends]
        options["eos_token_id"] = [*ends, *(given.stop_token_ids or ())]
        options["stop_strings"] = own.pop("stop_strings", None)
        if given.stop:
            options["stop_strings"] = given.stop
        options["return_logprobs"] = given.logprobs is not None and given.logprobs is not False
        options["return_routing"] = bool(given.return_routed_experts)
        options |= own  # only the repetition penalty is left in `own`
        for name in ("repetition_penalty", "presence_penalty", "seed"):
            if getattr(given, name) is not None:
                options[name] = getattr(given, name)
        return options, config

    def _of_config(self, given: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """Return the settings to apply from a request's generation_config. Raises ValueError for unsupported ones."""
        plain, applied = type(config)(), {}
        for name, value in given.items():
            if name in _CONFIG and value is not None:
                applied[name] = value
                continue
            own, neutral = getattr(config, name, None), (None, getattr(plain, name, None), *UNSERVED.get(name, ()))
            # A value without effect does not turn off what the model's config asks for.
            if value is not None and value != own and not (value in neutral and own in neutral):
                raise ValueError(f"generation_config.{name[:80]}: {shown(value)} is not served")
        return applied

    def _prompts(self, given: Any) -> list[list[int]]:
        """Return a list of tokens for each prompt of a completion request, which may be text or tokens."""
        prompt = given.prompt
        several = prompt if isinstance(prompt, list) else [prompt]
        if isinstance(prompt, list) and all(isinstance(one, int) for one in prompt):
            several = [prompt]
        if not several or not all(isinstance(one, str | list) for one in several):
            raise ValueError(f"prompt: expected a string, a list of tokens, or a list of these, got {shown(prompt)}")
        if len(several) > MOST_PROMPTS:
            raise ValueError(f"prompt: {len(several)} prompts are more than {MOST_PROMPTS}, the most of a request")
        return [self._encode("prompt", one, given.add_special_tokens is not False) for one in several]

    def _encode(self, name: str, prompt: str | list, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a prompt. Raises ValueError, naming the field, if it is empty, invalid or too long."""
        if len(prompt) > (self._most if isinstance(prompt, str) else self._max_length):
            raise ValueError(f"{name}: longer than {self._max_length} tokens, the most of a prompt and its answer")
        if isinstance(prompt, str):
            try:
                prompt = self._tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
            except (TypeError, UnicodeError) as error:  # raised for a lone surrogate
                raise ValueError(f"{name}: it is not Unicode ({error})") from error
        if not prompt or not all(type(token) is int and abs(token) < 2**63 for token in prompt):
            raise ValueError(f"{name}: expected one or more tokens, got {shown(prompt)}")
        return prompt

    def _chat(self, given: Any, tools: list[dict] | None) -> str:
        """Return the chat formatted by the model's chat template."""
        from jinja2 import TemplateError

        chat = [_message(one) for one in given.messages]
        variables = dict(given.chat_template_kwargs or {})
        if _size((chat, tools, variables, given.documents)) > self._most:
            raise ValueError(f"messages: longer than {self._max_length} tokens, the most of a prompt and its answer")
        for name in variables.keys() & self._arguments:
            raise ValueError(f"chat_template_kwargs.{name}: not a variable of the chat template, but of the tokenizer")
        if given.reasoning_effort is not None:
            if "reasoning_effort" not in str(self._tokenizer.chat_template):
                raise ValueError("reasoning_effort: the chat template of this model does not know it")
            variables["reasoning_effort"] = given.reasoning_effort
        goes_on = bool(given.continue_final_message)
        begins = not goes_on if given.add_generation_prompt is None else given.add_generation_prompt
        variables |= {"documents": given.documents, "continue_final_message": goes_on, "add_generation_prompt": begins}
        try:
            text = self._tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, **variables)
            left_out = tools and text == self._tokenizer.apply_chat_template(chat, tokenize=False, **variables)
        except (TemplateError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"messages: the chat template cannot take them ({error})") from error
        if left_out:
            raise ValueError("tools: the chat template of this model leaves them out")
        return text


def _fields(given: Any) -> dict[str, str]:
    """Return `Asked.fields` of a parsed body. Where it sets no limit, a prompt is what can be too long."""
    prompt = "messages" if isinstance(given, _Chat) else "prompt"
    limits = [name for name in ("max_completion_tokens", "max_tokens") if getattr(given, name, None) is not None]
    if given.generation_config is not None and given.generation_config.max_new_tokens is not None:
        limits.append("generation_config.max_new_tokens")
    ends = "stop_token_ids" if given.stop_token_ids else "generation_config.eos_token_id"
    return {"input_ids": prompt, "max_new_tokens": [*limits, prompt][0], "eos_token_id": ends}


def _message(message: _Message) -> dict[str, Any]:
    """Return a message in the form that chat templates expect, with its content as one string."""
    said = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        said["content"] = " ".join(part.text for part in message.content)
    return {"content": ""} | said


def _size(value: Any) -> int:
    """Return the number of characters of all strings in parsed JSON; any other value counts as one character."""
    if isinstance(value, dict):
        return sum(len(key) + _size(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return 1 + sum(map(_size, value))
    return len(value) if isinstance(value, str) else 1


def _told(error: ValidationError) -> str:
    """Describe what is wrong with a body. If there are several errors, choose the field with the longest path."""
    found: Mapping[str, Any] = max(reversed(error.errors()), key=lambda one: len(one["loc"]))
    if found["type"] == "extra_forbidden":
        return f"{_path(found['loc'])}: not a field that is served"
    said = found["msg"].replace("Input should", "it should")
    return f"{_path(found['loc']) or 'body'}: {said}, got {shown(found['input'])}"


def _path(place: Iterable[Any]) -> str:
    """Return the path of a field as text, without the names of types that pydantic has tried for it."""
    return ".".join(str(one)[:80] for one in place if isinstance(one, int) or one.isidentifier() and one != "str")
