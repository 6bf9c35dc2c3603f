"""A model's pair of parsers, compiled for its vocabulary, and what one request makes of it.

The law: everything that is constant over a model is worked out when it is loaded (`OutputFormat`), everything that is
constant over a request once per request (`MarkupPlan`, by `OutputFormat.plan`); `MarkupPlan.reader` then makes the
state machine of one choice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from proxy.derender.channels import ChannelMarkup, ChannelRules
from proxy.derender.codecs.base import MarkupLimits, Syntax
from proxy.derender.codecs.elements import ElementSyntax
from proxy.derender.codecs.header_calls import HeaderSyntax
from proxy.derender.codecs.json_calls import ArgumentsSyntax, JsonSyntax
from proxy.derender.codecs.pythonic import PythonicSyntax
from proxy.derender.codecs.quoted_map import QuotedMapSyntax
from proxy.derender.codecs.tagged_calls import TaggedSyntax
from proxy.derender.markers import Literals, Marks
from proxy.derender.markup import CallPolicy, CallSink, Markup, MarkupRules, Reader
from proxy.derender.schemas import ToolSchemas
from proxy.derender.vocabulary import Vocabulary
from proxy.formats.kinds import (
    Calls,
    Channels,
    ElementCalls,
    HeaderCalls,
    JsonCalls,
    PythonicCalls,
    QuotedMapCalls,
    Reasoning,
    TaggedCalls,
    markers,
)

FARTHEST_BACK = 8192
"""Tokens at the end of a prompt that are looked at for where the answer begins."""

FORCED_LIST = JsonCalls(array=True)

_SYNTAXES: dict[type, Callable[[Any, Marks], Syntax]] = {
    JsonCalls: JsonSyntax,
    HeaderCalls: HeaderSyntax,
    TaggedCalls: TaggedSyntax,
    ElementCalls: ElementSyntax,
    PythonicCalls: PythonicSyntax,
    QuotedMapCalls: QuotedMapSyntax,
}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools. `asked`: it has some, and allows calls; `required`: it demands one; `only`: of this
    function; `parallel` false: one call at most."""

    tools: Sequence[Mapping[str, Any]] = ()
    asked: bool = False
    required: bool = False
    only: str | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class MarkupPlan:
    """One request's reading of one model's format."""

    marks: Marks
    rules: MarkupRules | ChannelRules
    policy: CallPolicy
    schemas: ToolSchemas
    limits: MarkupLimits
    inside: bool
    header: str = ""

    def reader(self, seed: str) -> Reader:
        """For one choice; the ids of its calls are made from `seed`."""
        sink = CallSink(self.marks, self.policy, seed)
        if isinstance(self.rules, ChannelRules):
            return ChannelMarkup(self.rules, sink, self.header)
        return Markup(self.rules, sink, self.schemas, self.limits, inside=self.inside)


class OutputFormat:
    """`reasoning` and `calls` as declared in `proxy.formats`; either may be missing."""

    def __init__(
        self, reasoning: Reasoning | None, calls: Sequence[Calls], vocabulary: Vocabulary, limits: MarkupLimits
    ) -> None:
        self.reasoning, self.calls, self._vocabulary, self._limits = reasoning, tuple(calls), vocabulary, limits
        declared = [reasoning, *calls] if reasoning else [*calls]
        self.marks = Marks(vocabulary.added_texts, [marker for d in declared for marker in markers(d)])
        self.channels = next((ChannelRules(c, self.marks) for c in calls if isinstance(c, Channels)), None)
        self._rules = lru_cache(maxsize=64)(self._compile)
        encode = self.marks.encode
        self._open = frozenset(map(encode, reasoning.open)) if reasoning else frozenset()
        closers = map(encode, reasoning.close) if reasoning else ()
        self._spans = Literals([*self._open, *closers])

    def plan(self, use: ToolUse, prompt_token_ids: Sequence[int], variables: Mapping[str, Any]) -> MarkupPlan:
        """`variables`: those of the chat template, for where the prompt does not say where the answer begins."""
        hidden = any(calls.hidden for calls in self.calls)
        policy = CallPolicy(
            shown=use.asked,
            only_first=not use.parallel,
            nine_ids=any(isinstance(calls, HeaderCalls) and calls.ids == "nine" for calls in self.calls),
            text=not (use.required and all(calls.forced_json for calls in self.calls)),
        )
        tail = self._tail(prompt_token_ids)
        inside = self._starts_inside(tail, variables)
        reasons = inside or self.reasoning is None or not self.reasoning.once
        reads_calls = bool(self.calls) and (use.asked or hidden)
        rules = self.channels or self._rules(reasons, reads_calls, use.required, use.only)
        header = self.channels.header_in(tail) if self.channels is not None else ""
        return MarkupPlan(self.marks, rules, policy, ToolSchemas(use.tools), self._limits, inside, header)

    def _compile(self, reasons: bool, reads_calls: bool, required: bool, only: str | None) -> MarkupRules:
        """With the forms that a JSON schema makes of a call that the request demands: a list of names with their
        arguments, or, of the one function `only`, the arguments alone."""
        syntaxes: list[Syntax] = []
        for calls in self.calls:
            if isinstance(calls, JsonCalls) and not calls.open:
                syntaxes.append(JsonSyntax(calls, self.marks, only))
            elif not isinstance(calls, Channels):
                syntaxes.append(_SYNTAXES[type(calls)](calls, self.marks))
        if reads_calls and only is not None:
            syntaxes.append(ArgumentsSyntax(only))
        elif reads_calls and required:
            syntaxes.append(JsonSyntax(FORCED_LIST, self.marks))
        return MarkupRules(self.reasoning if reasons else None, syntaxes, self.marks, reads_calls)

    def reasoning_ended(self, prompt_token_ids: Sequence[int], variables: Mapping[str, Any]) -> bool:
        """Whether the answer begins outside the reasoning."""
        return not self._starts_inside(self._tail(prompt_token_ids), variables)

    def _tail(self, prompt_token_ids: Sequence[int]) -> str:
        """The end of the prompt with marks, from where its last turn begins."""
        start = self.turn_start(prompt_token_ids)
        tail = prompt_token_ids[-FARTHEST_BACK:] if start is None else prompt_token_ids[start:]
        return "".join(self.marks.by_id.get(i) or self._vocabulary.text_of(i) for i in tail)

    def turn_start(self, prompt_token_ids: Sequence[int]) -> int | None:
        """Where the last special token stands that is no marker, or that begins a message of channels; None where there
        is none near the end."""
        special, by_id = self._vocabulary.special_ids, self.marks.by_id
        begins = self.channels.start if self.channels is not None else None
        end = len(prompt_token_ids)
        for at in range(end - 1, max(end - FARTHEST_BACK, 0) - 1, -1):
            mark = by_id.get(prompt_token_ids[at])
            if mark == begins if mark is not None else prompt_token_ids[at] in special:
                return at
        return None

    def _starts_inside(self, tail: str, variables: Mapping[str, Any]) -> bool:
        reasoning = self.reasoning
        if reasoning is None:
            return False
        said = None
        at, marker = self._spans.find(tail, 0, True)
        while marker is not None:
            said = marker
            at, marker = self._spans.find(tail, at + len(marker), True)
        if said is not None:
            return said in self._open
        for name in reasoning.switches:
            if name in variables:
                return variables[name] not in (False, None, "none", "no_think", "off", "disabled")
        return reasoning.starts == "inside"
