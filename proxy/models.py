"""What is loaded per served model: the parts of render and derender that belong to it, its limits, its pool.

Built once, from files that `model_files.py` has read; nothing here changes while requests run. Models that name the
same files share their tokenizer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from proxy.derender.output_format import OutputFormat
from proxy.derender.vocabulary import Vocabulary
from proxy.generate.pool import Pool
from proxy.model_files import ModelFiles, ModelFilesError
from proxy.protocol.errors import BadRequest, NotFound
from proxy.record import Recorder
from proxy.render.escaping import SpecialTextEscaper
from proxy.render.renderer import ChatRenderer, ChatSettings, TemplateRenderer, TextTokenizer
from proxy.render.sampling import Limits, SamplingDefaults
from proxy.render.tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What is made of one tokenizer.json or tekken.json.

    `renderer` makes what renders a model's chats, and raises ValueError for settings that cannot be. `eos_token_ids`
    are those that the tokenizer knows of and no other file.
    """

    prompt: TextTokenizer
    vocabulary: Vocabulary
    renderer: Callable[[ChatSettings], ChatRenderer]
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, files: ModelFiles) -> "TokenizerParts":
        """Raises ModelFilesError."""
        if files.tokenizer_json is None:
            return cls._of_tekken(files)
        try:
            tokenizer = Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise ModelFilesError(f"{files.name}: tokenizer.json cannot be loaded: {error}") from error
        vocabulary = Vocabulary.of_tokenizer(tokenizer)
        prompt, escaper = PromptTokenizer(tokenizer), SpecialTextEscaper(vocabulary.special_texts)
        return cls(prompt, vocabulary, partial(TemplateRenderer, prompt, escaper))

    @classmethod
    def _of_tekken(cls, files: ModelFiles) -> "TokenizerParts":
        try:
            from proxy.render.mistral import MistralRenderer, TekkenTokenizer  # its package is an extra
        except ImportError as error:
            advice = "pip install 'derender-proxy[mistral]'"
            raise ModelFilesError(
                f"{files.name}: tekken.json needs the package mistral-common ({error}): {advice}"
            ) from error
        try:
            tokenizer = TekkenTokenizer(str(files.tekken))
        except Exception as error:  # of the package's own, of JSON, and bare assertions
            reason = str(error) or type(error).__name__
            raise ModelFilesError(f"{files.name}: tekken.json cannot be loaded: {reason}") from error
        vocabulary = Vocabulary.of_table(tokenizer.tokens, tokenizer.special_texts)
        eos = frozenset({tokenizer.eos_token_id})
        return cls(tokenizer, vocabulary, partial(MistralRenderer, tokenizer), eos)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`names` are what clients may call it, the canonical one first; `root` is where its files came from.

    `output_format` is how its parsers read its output, None where it has none and all output is content; `parsers` are
    their names, for tool calls and for reasoning."""

    names: Sequence[str]
    root: str
    created: int
    pool: Pool
    tokenizer: TokenizerParts
    chats: ChatRenderer
    eos_token_ids: frozenset[int]
    limits: Limits
    defaults: SamplingDefaults
    return_tokens_as_token_ids: bool
    output_format: OutputFormat | None = None
    parsers: tuple[str | None, str | None] = (None, None)
    enable_auto_tool_choice: bool = False
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_field: str = "reasoning"
    recorder: Recorder | None = None

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
