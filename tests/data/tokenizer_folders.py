"""Small tokenizers in the form of well-known ones: folders as of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_GPT2_WORDS = r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("SPACE", "h"), ("SPACEh", "e")]
# Special tokens by kind, with the settings of tokenizer_config.json.
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama3": {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    },
    "llama2": {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
        "tokenizer_class": "LlamaTokenizer",
    },
    "gemma3": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "add_bos_token": True,
        "add_eos_token": False,
        "tokenizer_class": "GemmaTokenizer",
    },
    "qwen2": {
        "bos_token": None,
        "eos_token": "<|endoftext|>",
        "add_bos_token": False,
        "tokenizer_class": "Qwen2Tokenizer",
    },
    "gpt2": {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "tokenizer_class": "GPT2Tokenizer",
    },
}


def write_tokenizer(folder: Path, kind: str, post: str = "", **settings: Any) -> str:
    """Writes tokenizer.json and tokenizer_config.json; returns the path of the first.

    Args:
        kind: one of llama3, llama2, gemma3, qwen2, gpt2.
        post: the template of the post-processor instead of the usual one, such as "<s> $A </s>".
        settings: more of tokenizer_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = _CONFIGS[kind] | settings
    tokenizer = _spaced(kind) if kind in ("llama2", "gemma3") else _byte_level(kind)
    usual = {"llama3": "<|begin_of_text|> $A", "llama2": "<s> $A", "gemma3": "<bos> $A"}
    if template := post or usual.get(kind, ""):
        special = [(x, tokenizer.token_to_id(x)) for x in template.split() if x != "$A"]
        processor = processors.TemplateProcessing(single=template, special_tokens=special)
        if kind == "llama3":
            processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processor])
        tokenizer.post_processor = processor
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder / "tokenizer.json")


def _byte_level(kind: str) -> Tokenizer:
    merges = [tuple(x.replace("SPACE", "Ġ") for x in pair) for pair in _MERGES]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(_GPT2_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {
        "llama3": ["<|begin_of_text|>", "<|end_of_text|>"],
        "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "gpt2": ["<|endoftext|>"],
    }[kind]
    tokenizer.add_special_tokens([AddedToken(x, normalized=False) for x in special])
    return tokenizer


def _spaced(kind: str) -> Tokenizer:
    special = {"llama2": ["<unk>", "<s>", "</s>"], "gemma3": ["<pad>", "<eos>", "<bos>", "<unk>"]}
    merges = [tuple(x.replace("SPACE", "▁") for x in pair) for pair in _MERGES]
    words = [*special[kind], *(f"<0x{x:02X}>" for x in range(256)), *"▁helowrd", "\n", "▁▁"]
    words += map("".join, merges)
    tokenizer = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)},
            [("▁", "▁"), *merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", "▁")
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "llama2":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        decoder.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(decoder)
    tokenizer.add_special_tokens([AddedToken(x, normalized=False) for x in special[kind]])
    return tokenizer
