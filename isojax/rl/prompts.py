"""Text to tokens for prompts, and tokens to text for rewards; text never becomes history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from contracts import token_ids
from contracts.errors import BadCheckpoint, BadConfig, EmptyBatch, PromptTooLong
from contracts.user_files import read_bytes, read_json_object, read_text
from isojax.rl.tasks import Example


class PromptEncoder:
    """A policy folder's tokenizer and chat template, or neither for a policy that has only tokens."""

    def __init__(self, folder: Path) -> None:
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` where `folder` has them.

        Raises BadCheckpoint if one is damaged.
        """
        self._tokenizer = _read_tokenizer(folder / "tokenizer.json")
        self._settings = _read_settings(folder / "tokenizer_config.json")
        self._template = _read_template(folder, self._settings)

    def encode(self, example: Example, *, system: str | None = None) -> tuple[int, ...]:
        """The example's prompt as tokens.

        Raises BadConfig for text without a tokenizer or a chat without a template, EmptyBatch for a prompt of 0 tokens.
        """
        if example.tokens is not None:
            tokens = example.tokens
        elif example.text is not None:
            tokens = self._tokens(example.text, special=True)
        else:
            messages = list(example.messages or ({"role": "user", "content": example.prompt or ""},))
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            text = self._render(messages)
            # The template writes the special tokens itself.
            tokens = self._tokens(text, special=False)
        if not tokens:
            raise EmptyBatch(
                field="prompt", found=0, allowed="1 or more tokens", reason="A policy predicts from a token."
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a completion without special tokens, for its reward only; "" without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _tokens(self, text: str, *, special: bool) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise BadConfig(
                field="task",
                found="a prompt in text",
                allowed="prompts in tokens",
                reason="The policy has no tokenizer.",
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise BadConfig(
                field="task",
                found=ascii(text)[:80],
                allowed="text without lone surrogates",
                reason="It has no UTF-8 form.",
            )
        return tuple(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if self._template is None:
            raise BadConfig(
                field="task",
                found="a chat prompt",
                allowed="the keys 'text' or 'tokens'",
                reason="The policy's tokenizer has no chat template.",
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_template_error
        special = {key: _token_text(value) for key, value in self._settings.items() if key.endswith("_token")}
        try:
            return environment.from_string(self._template).render(
                messages=messages, add_generation_prompt=True, **special
            )
        # Broad, since a template is the checkpoint's own program and may raise anything.
        except Exception as error:
            raise BadConfig(
                field="task",
                found=messages,
                allowed="messages that the chat template takes",
                reason=f"{type(error).__name__}: {error}",
            ) from error


def encode_prompts(
    encoder: PromptEncoder,
    examples: Sequence[Example],
    *,
    system: str | None,
    max_tokens: int,
    max_position: int,
    vocab_size: int,
) -> list[tuple[int, ...]]:
    """The examples' prompts as tokens, each with room for a completion of `max_tokens` in a context of `max_position`.

    Raises PromptTooLong, BadConfig for a token id outside of the vocabulary, and what `PromptEncoder.encode` raises.
    """
    prompts = [encoder.encode(example, system=system) for example in examples]
    for number, prompt in enumerate(prompts):
        if len(prompt) + max_tokens > max_position:
            raise PromptTooLong(
                field=f"prompt {number}",
                found=f"{len(prompt)} tokens and a completion of up to {max_tokens}",
                allowed=f"{max_position} tokens in all",
                reason="The policy's context ends there; shorten the prompt or rollout.max_tokens.",
            )
        token_ids(prompt, field=f"prompt {number}", vocab_size=vocab_size)
    return prompts


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _token_text(value: Any) -> Any:
    """Tokenizer settings hold special tokens as text or as an object with the text inside."""
    return value["content"] if isinstance(value, dict) and "content" in value else value


def _read_tokenizer(path: Path) -> FastTokenizer | None:
    if not path.exists():
        return None
    try:
        # Of the library's readers this is the one that raises ValueError, and not bare Exception, for a damaged file.
        return FastTokenizer.from_buffer(read_bytes(path, refusal=BadCheckpoint, allowed="a tokenizer"))
    except ValueError as error:
        raise BadCheckpoint(field=str(path), found="damaged", allowed="a tokenizer", reason=str(error)) from None


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return read_json_object(path, refusal=BadCheckpoint)


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path, refusal=BadCheckpoint, allowed="a Jinja template")
    template = settings.get("chat_template")
    if isinstance(template, list):
        # The older form: several templates with names.
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default", template)
    if template is not None and not isinstance(template, str):
        raise BadCheckpoint(
            field=f"{folder / 'tokenizer_config.json'}, chat_template",
            found=repr(template)[:80],
            allowed="text, or a list of {name, template} with one named default",
            reason="It turns a chat into the policy's prompt.",
        )
    return template
