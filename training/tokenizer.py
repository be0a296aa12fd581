"""`python -m training.tokenizer TEXT_FILES … --out FOLDER`: a byte-level BPE tokenizer of 8192 tokens.

The shipped one was made this way from 45 MB of the corpus, and a new model keeps it: its ids are what recorded
prompts and tests speak. `python -m training.corpus` encodes with whatever folder it is given.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .vocabulary import ADDED, CONTROL, SIZE, added

# Qwen3.5's own expression.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = Path(__file__).parents[1] / "src/headstart/builtin/tiny-qwen3.5/chat_template.jinja"


def train(texts: Iterable[str], size: int = SIZE) -> Tokenizer:
    """`size` tokens learned and added, the added ones last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learned = size - len(ADDED)
    trainer = trainers.BpeTrainer(
        vocab_size=learned, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != learned:
        raise ValueError(f"the text gave {tokenizer.get_vocab_size()} tokens instead of {learned}: give it more text")
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ADDED[:CONTROL]])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED[CONTROL:]])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, context_length: int = 4096) -> None:
    """The files that a checkpoint needs of it, with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    first = added(tokenizer.get_vocab_size()).end_of_text
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "errors": "replace",
        "split_special_tokens": False,
        "added_tokens_decoder": {
            str(first + i): {"content": token, "special": i < CONTROL, **plain} for i, token in enumerate(ADDED)
        },
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))
    (folder / "chat_template.jinja").write_text(template)
    ids = added(tokenizer.get_vocab_size())
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    ends = {"eos_token_id": [ids.im_end, ids.end_of_text], "pad_token_id": ids.end_of_text}
    (folder / "generation_config.json").write_text(json.dumps(sampling | ends, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    save(train(path.read_text(encoding="utf-8") for path in arguments.texts), arguments.out)


if __name__ == "__main__":
    main()
