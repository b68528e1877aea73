"""Tokenizer files of a policy: copied from a folder, or rebuilt from GGUF metadata in Hugging Face form."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from contracts import sha256_hex, token_ids
from contracts.errors import BadCheckpoint, UnsupportedModel
from contracts.user_files import read_bytes
from isojax.weights.gguf import open_gguf

TokenizerFiles = dict[str, bytes]

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
# Everything from which transformers, vLLM and isojax turn text into tokens.
_FILES = (
    *(TOKENIZER_FILE, SETTINGS_FILE, "chat_template.jinja", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt"),
)
# llama.cpp's names of how text is cut before the merges.
_PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
    "gpt-2": lambda: _byte_level(),
}
_CONTROL, _USER_DEFINED = 3, 4


def tokenizer_files(source: str | Path) -> TokenizerFiles:
    """The tokenizer's files by name: of a Hugging Face folder as they are, of a .gguf file rebuilt.

    Empty for a folder without tokenizer.json (a policy that knows tokens only). Raises `BadCheckpoint` for a damaged
    source and `UnsupportedModel` for a GGUF tokenizer that has no exact Hugging Face form here.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        return rebuilt_tokenizer(open_gguf(path).metadata)
    if not (path / TOKENIZER_FILE).exists():
        return {}
    return {
        name: read_bytes(path / name, refusal=BadCheckpoint, allowed="a tokenizer's file")
        for name in _FILES
        if (path / name).exists()
    }


def tokenizer_digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 over the names and contents of the files, chat template included."""
    return sha256_hex({name: hashlib.sha256(content).hexdigest() for name, content in files.items()})


def rebuilt_tokenizer(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """Hugging Face files of the tokenizer in a GGUF file's metadata.

    Raises `UnsupportedModel` for one that has no exact form here and `BadCheckpoint` for one that contradicts itself.
    """
    values = {name.removeprefix("tokenizer."): value for name, value in metadata.items()}
    kind, pre = values.get("ggml.model"), values.get("ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            field="tokenizer.ggml.pre",
            found=f"{kind}/{pre}",
            allowed=[f"gpt2/{name}" for name in _PRE_TOKENIZERS],
            reason="Other tokenizers are taken from a Hugging Face folder, where they are stored exactly.",
        )
    if values.get("ggml.add_bos_token") or values.get("ggml.add_eos_token") or values.get("ggml.add_space_prefix"):
        raise UnsupportedModel(
            field="tokenizer.ggml.add_bos_token",
            found=True,
            allowed=False,
            reason="Implicit tokens are not rebuilt from GGUF; take the tokenizer from a Hugging Face folder.",
        )
    tokens, types = _list(values, "ggml.tokens", str), _list(values, "ggml.token_type", int)
    if len(types) != len(tokens):
        raise _damaged("ggml.token_type", f"{len(types)} types", f"one a token, {len(tokens)}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        double = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise _damaged("ggml.tokens", f"{double!r} twice", "every token once")
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges(_list(values, "ggml.merges", str), vocabulary),
        # As in the checkpoints that llama.cpp converts: no unknown pieces, since every byte is a token.
        fuse_unk=False,
        byte_fallback=False,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=k == _CONTROL) for t, k in added])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {}
    for name, key in names.items():
        if (index := values.get(f"ggml.{key}_token_id")) is not None:
            (checked,) = token_ids(
                [index], field=f"tokenizer.ggml.{key}_token_id", vocab_size=len(tokens), refusal=BadCheckpoint
            )
            special[f"{name}_token"] = tokens[checked]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get("llama.context_length"),
        **special,
    }
    if (template := values.get("chat_template")) is not None:
        settings["chat_template"] = template
    return {
        TOKENIZER_FILE: tokenizer.to_str(pretty=True).encode(),
        SETTINGS_FILE: (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode(),
    }


def _merges(lines: Iterable[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of a byte-pair encoding. The library would panic on some that do not fit the vocabulary."""
    merges = []
    for line in lines:
        left, _, right = line.partition(" ")
        if not all(token in vocabulary for token in (left, right, left + right)):
            raise _damaged("ggml.merges", repr(line)[:80], "two tokens and a space between, which make a third")
        merges.append((left, right))
    return merges


def _list(values: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    value = values.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(item, kind) for item in value):
        raise _damaged(name, repr(value)[:80], f"a list of {kind.__name__}")
    return value


def _damaged(name: str, found: str, allowed: str) -> BadCheckpoint:
    return BadCheckpoint(
        field=f"tokenizer.{name}", found=found, allowed=allowed, reason="The GGUF file holds no whole tokenizer."
    )


def _byte_level() -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
