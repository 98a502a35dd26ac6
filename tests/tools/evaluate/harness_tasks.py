"""Two small tasks for lm-evaluation-harness, and a checkpoint with a tokenizer to run them on.

`python -m tests.tools.evaluate.harness_tasks FOLDER` runs them with the harness model class `hf`
and prints the answers as JSON, as stored in harness_hf.json. It needs torch and transformers,
and only the data of this repository.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
WORDS = "the grass is green and sky blue sun yellow here we go there back again".split()


def prepare(folder: Path) -> Path:
    """Copies a checkpoint and adds a byte tokenizer, as the class `hf` needs it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model = folder / "model"
    shutil.copytree(CHECKPOINTS / "qwen2_tiny", model)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = {"eos_token_id": len(alphabet)}
    (model / "generation_config.json").write_text(json.dumps(ids))
    return model


def tasks(folder: Path) -> list[dict]:
    """Multiple choice, perplexity and generation on texts of random words, written to `folder`."""
    rng = np.random.default_rng(0)

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS, words))

    rows = {
        "choice": [
            {"query": text(4 + 2 * i), "choices": [text(1), text(2), text(3)], "gold": i % 3}
            for i in range(6)
        ],
        # The last text is longer than the model's 512 positions: two windows.
        "perplexity": [{"text": text(n)} for n in (3, 30, 150)],
        "generation": [{"query": text(5), "answer": text(1)} for _ in range(3)],
    }
    found = []
    for name, documents in rows.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in documents))
        found.append(
            {
                "task": f"tiny_{name}",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(file)}},
                "test_split": "test",
            }
            | _HOW[name]
        )
    return found


_HOW = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "generation": {
        "output_type": "generate_until", "doc_to_text": "{{query}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["e", "zz"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
        ],
    },
}  # fmt: skip


def answers(model: object, folder: Path) -> dict[str, list]:
    """Returns a model's answer to every request of each task, as the harness logs it."""
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks(folder),
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    return {
        name: [sample["filtered_resps"] for sample in samples]
        for name, samples in found["samples"].items()
    }


def main() -> None:
    """Prints the answers of the class `hf`, and the versions of its packages."""
    folder = Path(sys.argv[1])
    model = prepare(folder)
    import lm_eval
    import torch
    import transformers
    from lm_eval.models.huggingface import HFLM

    hf = HFLM(str(model), device="cpu", dtype="float32", batch_size=1)
    made_with = {
        "lm_eval": lm_eval.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps({"made_with": made_with, "answers": answers(hf, folder)}, indent=1))


if __name__ == "__main__":
    main()
