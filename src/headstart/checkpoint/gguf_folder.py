"""The folder of the model in a GGUF file: config.json, tokenizer and chat template, made once and kept in the cache.

It has a link to the file, whose tensors are read where they are. Everything else takes it for any other folder.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, printable_error
from ..kernels.cache import cache_folder
from .atomic import publish, staging_folder
from .gguf import GGUFFile, read_gguf
from .gguf_model import gguf_config

LINK = "model.gguf"
MADE_BY = "1"  # changes with what is made of a file
CONTROL = 3  # the type of tokens that are no text
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
TOKENIZER = {
    "model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens", "scores": "scores",
    "token_type": "token_type", "merges": "merges", "add_space_prefix": "add_prefix_space",
    "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
}  # fmt: skip


def gguf_in(path: Path) -> Path | None:
    """Return the GGUF file that `path` names or, without files of another format, has in it; None for a folder of
    another kind."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    files = sorted(path.glob("*.gguf"))
    if not files or (path / LINK).is_symlink() or any(path.glob("*.safetensors*")):
        return None
    first = [file for file in files if "-of-" not in file.name or "-00001-of-" in file.name]
    models = [file for file in first if not file.name.startswith("mmproj")]
    if len(models) != 1:
        raise CheckpointError(f"{path}: {len(models)} GGUF files of models. Name one of them.")
    return models[0]


def gguf_folder(file: Path) -> Path:
    """Return the folder of the model in a GGUF file."""
    file = file.absolute()
    status = file.stat()
    stamp = "\n".join((MADE_BY, str(file), str(status.st_size), str(status.st_mtime_ns)))
    digest = hashlib.sha256(stamp.encode()).hexdigest()[:16]
    folder = cache_folder().parent / "gguf" / digest / file.stem
    if folder.is_dir():
        return folder
    gguf = read_gguf(file)
    config = gguf_config(gguf)
    tokenizer, settings = _tokenizer(gguf)
    with staging_folder(folder) as made:
        (made / LINK).symlink_to(file)
        (made / "config.json").write_text(json.dumps(config, indent=2))
        (made / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False))
        (made / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        (made / "generation_config.json").write_text(json.dumps({"eos_token_id": _ends(gguf)}))
        publish(made, folder)
    return folder


def linked_gguf(folder: Path) -> Path | None:
    """Return the file that a folder was made from."""
    link = folder / LINK
    return Path(os.readlink(link)) if link.is_symlink() else None


def _ends(gguf: GGUFFile) -> list[int]:
    """Return the tokens at which an answer ends: what the file says, and those of a known name, as llama.cpp does."""
    prefix = "tokenizer.ggml."
    named = [gguf.metadata.get(f"{prefix}{name}_token_id") for name in ("eos", "eot", "eom")]
    kinds = zip(gguf.metadata[prefix + "tokens"], gguf.metadata.get(prefix + "token_type", ()), strict=False)
    control = [token if kind == CONTROL else "" for token, kind in kinds]
    known = [control.index(token) for token in ENDS if token in control]
    return list(dict.fromkeys(token for token in (*named, *known) if type(token) is int))


def _tokenizer(gguf: GGUFFile) -> tuple[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json."""
    from tokenizers import Tokenizer, processors
    from transformers.integrations.gguf import convert_gguf_tokenizer

    prefix = "tokenizer.ggml."
    fields = {
        ours: gguf.metadata[prefix + name] for name, ours in TOKENIZER.items() if prefix + name in gguf.metadata
    }
    if fields.get("tokenizer_type") == "gpt2":
        fields.setdefault("merges", [])
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{gguf.path}: has no tokenizer. Take another file of the model.")
    try:
        made, _ = convert_gguf_tokenizer(gguf.architecture, fields)
        ids = {name: gguf.metadata.get(f"{prefix}{theirs}_token_id") for name, theirs in SPECIAL.items()}
        settings: dict[str, Any] = {name: tokens[token] for name, token in ids.items() if token is not None}
        begins = gguf.metadata.get(prefix + "add_bos_token", fields.get("tokenizer_type") == "llama")
        if begins and (bos := settings.get("bos_token")):
            made.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, ids["bos_token"])]
            )
        text = made.to_str()
        Tokenizer.from_str(text)
    except BaseException as error:  # tokenizers written in Rust panic with a BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{gguf.path}: its tokenizer cannot be used ({printable_error(error)}).") from error
    if isinstance(template := gguf.metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    return text, {**settings, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
