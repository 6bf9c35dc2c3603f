"""What is loaded per served model: the parts of render and derender that belong to it, its limits, its pool.

Built once, from files that `model_files.py` has read; nothing here changes while requests run. Models that name the
same files share their tokenizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from proxy.derender.vocabulary import Vocabulary
from proxy.generate.pool import Pool
from proxy.model_files import ModelFiles, ModelFilesError
from proxy.protocol.errors import BadRequest, NotFound
from proxy.render.chat_template import ChatTemplates
from proxy.render.escaping import SpecialTextEscaper
from proxy.render.sampling import Limits, SamplingDefaults
from proxy.render.tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What is made of one tokenizer.json."""

    prompt: PromptTokenizer
    vocabulary: Vocabulary
    escaper: SpecialTextEscaper

    @classmethod
    def of(cls, files: ModelFiles) -> "TokenizerParts":
        try:
            tokenizer = Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise ModelFilesError(f"{files.name}: tokenizer.json cannot be loaded: {error}") from error
        vocabulary = Vocabulary(tokenizer)
        return cls(PromptTokenizer(tokenizer), vocabulary, SpecialTextEscaper(vocabulary.special_texts))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`names` are what clients may call it, the canonical one first; `root` is where its files came from."""

    names: Sequence[str]
    root: str
    created: int
    pool: Pool
    tokenizer: TokenizerParts
    templates: ChatTemplates
    has_chat_template: bool
    default_chat_template_kwargs: Mapping[str, Any]
    split_special_tokens: bool
    eos_token_ids: frozenset[int]
    limits: Limits
    defaults: SamplingDefaults
    return_tokens_as_token_ids: bool

    @property
    def name(self) -> str:
        return self.names[0]


class Models:
    """The served models by every name they have."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.all = list(models)
        self._by_name = {name: model for model in models for name in model.names}

    def get(self, name: str | None) -> ServedModel:
        """The model of that name; without one, or with an empty one, the only model there is."""
        if not name:
            if len(self.all) == 1:
                return self.all[0]
            raise BadRequest(f"model is missing; name one of {', '.join(self._by_name)}", param="model")
        model = self._by_name.get(name)
        if model is None:
            raise NotFound(
                f"The model `{name}` does not exist. Served here: {', '.join(self._by_name)}.",
                param="model",
                code="model_not_found",
            )
        return model
