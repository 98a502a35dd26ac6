"""Adapter for lm-evaluation-harness, to run its tasks on models of this package.

python -m mtraining_jax.tools.evaluate.lm_eval --model mtraining_jax \
    --model_args path=FOLDER,attention=sparse --tasks hellaswag
"""

from typing import Any

import jax

from mtraining_jax.tools.evaluate.engine.engine import Engine
from mtraining_jax.tools.evaluate.engine.options import GenerateOptions
from mtraining_jax.tools.evaluate.load import AttentionKind, digests_of
from mtraining_jax.utils.errors import UserError

try:
    from lm_eval import utils as harness_utils  # pyright: ignore[reportAttributeAccessIssue]
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs  # pyright: ignore[reportMissingImports]
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(
        f"cannot import lm-evaluation-harness ({error}); install the extra eval "
        "(uv run --extra eval, or pip install lm-eval)"
    ) from error

# Arguments that the harness passes to every model and that have no effect here: requests run one
# by one, on all devices.
_NOT_READ = ("batch_size", "max_batch_size", "device")
_MODEL = "model"  # key of its digests in a file of responses; theirs are hashes
_MAX_NEW_TOKENS = 256  # the harness' default
_SECTIONS = ("sparsity", "parallel", "model")


@register_model("mtraining_jax")
class HarnessModel(TemplateLM):  # pyright: ignore[reportGeneralTypeIssues]
    """A model for lm-evaluation-harness 0.4.13 or later.

    A text longer than the model's positions is an error. The harness class for Hugging Face models
    truncates the start instead, which may remove the needle from a haystack.

    Args:
        engine: the model; None loads it from `path`, with the other arguments of `Engine.load`.
        **more: fields of the sections sparsity, parallel and model by dotted name.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        path: str | None = None,
        attention: AttentionKind = "dense",
        dtype: str | None = None,
        tokenizer: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__()
        if jax.process_count() > 1:
            raise UserError(
                f"{jax.process_count()} processes are running, but lm-evaluation-harness supports "
                "only one; use the devices of one host"
            )
        overrides = {name: str(value) for name, value in more.items() if name not in _NOT_READ}
        for name in overrides:
            if name.partition(".")[0] not in _SECTIONS:
                raise UserError(
                    f"unknown model argument {name}; use path, attention, dtype, tokenizer or "
                    f"fields of {', '.join(_SECTIONS)}, such as sparsity.top_p"
                )
        if engine is None:
            if path is None:
                raise UserError("path is missing: give the folder of a run or of a checkpoint")
            engine = Engine.load(
                path, attention=attention, overrides=overrides, dtype=dtype, tokenizer=tokenizer
            )
        self.engine = engine
        self._tokenizer = engine.loaded.needed_tokenizer()

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Uses a file of responses (--use_cache), which must be of this model."""
        stored, own = cache_hook.dbdict, digests_of(self.engine.loaded)
        if len(stored) and stored.get(_MODEL) != own:
            raise UserError(
                f"--use_cache: {stored.filename} has responses of another model; give each model "
                "a file of its own"
            )
        stored[_MODEL] = own
        super().set_cache_hook(cache_hook)

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a whole text: that of data.bos, or else as the harness does."""
        tokenizer = self._tokenizer
        if tokenizer.bos or tokenizer.bos_token is None or tokenizer.usual_bos:
            return tokenizer.bos[-1] if tokenizer.bos else tokenizer.eos
        return tokenizer.bos_token

    @property
    def max_length(self) -> int:
        return self.engine.max_positions

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Encodes a text, with bos unless disabled; by default only if it does not state it."""
        plain = self._tokenizer.encode(string, bos=False).tolist()
        bos = list(self._tokenizer.bos)
        stated = add_special_tokens is None and plain[: len(bos)] == bos
        return plain if add_special_tokens is False or stated else bos + plain

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        found = []
        for texts, context, continuation in tqdm(requests, disable=disable_tqdm, desc="scoring"):
            forced = self.engine.forced(context, continuation)
            found.append((float(forced.log_probs.sum(dtype=float)), bool(forced.is_argmax.all())))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Scores full texts, in windows if they are longer than the context."""
        found = []
        for (text,) in tqdm([request.args for request in requests], disable=disable_tqdm):
            windows = harness_utils.get_rolling_token_windows(
                self.tok_encode(text, False), self.prefix_token_id, self.max_length, context_len=1
            )
            pairs = [(None, *harness_utils.make_disjoint_window(window)) for window in windows]
            answers = self._loglikelihood_tokens(pairs, disable_tqdm=True)
            found.append(sum(log_prob for log_prob, _ in answers))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        found = []
        for request in tqdm(requests, disable=disable_tqdm, desc="generating"):
            context, settings = request.args
            generated = self.engine.generate(self.tok_encode(context), generate_options(settings))
            found.append(generated.text)
            self.cache_hook.add_partial("generate_until", request.args, generated.text)
        return found


def generate_options(settings: dict[str, Any]) -> GenerateOptions:
    """Converts `generation_kwargs` of the harness; raises UserError for an unsupported one."""
    settings = normalize_gen_kwargs(settings, _MAX_NEW_TOKENS)
    until = handle_stop_sequences(settings.pop("until", None), eos=None)
    sampled = settings.pop("do_sample")
    temperature = float(settings.pop("temperature", 1.0))  # default of transformers
    options = GenerateOptions(
        max_new_tokens=settings.pop("max_gen_toks"),
        temperature=temperature if sampled else 0.0,
        top_p=float(settings.pop("top_p", 1.0)),
        seed=settings.pop("seed", 0),
        stop=tuple(text for text in until if text),
    )
    for name, value in settings.items():
        raise UserError(
            f"generation_kwargs: {name} = {value!r} is not supported; use until, max_gen_toks, "
            "do_sample, temperature, top_p or seed"
        )
    return options


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()
