"""How much a token costs the markup machine, and that it does not cost more the longer the output gets.

One token per feed, as a stream brings them. `python -m tests.bench.markup --help`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from proxy.derender.choice import ChoiceStream
from tests.derender.readings import ASKED, Format, known_format

PROSE = "The harbour lamp turns twice a minute, and the keeper counts: a < b, x = {1}, and so on.\n"
JSON = '{"name": "set_lamp", "arguments": {"room": "'
XML = "\n<function=set_lamp>\n<parameter=room>\n"


def qwen3() -> Format:
    return known_format("hermes", "qwen3")


def qwen3_coder() -> Format:
    return known_format("qwen3_xml", "qwen3")


def content_of(form: Format) -> str:
    return form.marks.encode("</think>")


PLACES: dict[str, tuple[Callable[[], Format], Callable[[Format], str]]] = {
    "plain content": (qwen3, content_of),
    "inside reasoning": (qwen3, lambda form: ""),
    "inside JSON arguments": (qwen3, lambda form: form.marks.encode("</think><tool_call>") + JSON),
    "inside XML parameters": (qwen3_coder, lambda form: form.marks.encode("</think><tool_call>") + XML),
}
"""What an output is made of, and what brings it there: its beginning, in marked text."""


def seconds(form: Format, beginning: str, pieces: Sequence[Sequence[int]]) -> float:
    """To feed `pieces`, one by one, after `beginning`."""
    stream = ChoiceStream(form.context(ASKED), "bench")
    stream.feed(form.ids(beginning))
    feed = stream.feed
    start = time.perf_counter()
    for ids in pieces:
        feed(ids)
    return time.perf_counter() - start


def median(measure: Callable[[], float], runs: int) -> float:
    return statistics.median(measure() for _ in range(runs))


def cost_per_token(lengths: Sequence[int], runs: int) -> None:
    print("\nmicroseconds per token, by the length of the output in tokens")
    print(f"{'':24}" + "".join(f"{length:>10,}" for length in lengths))
    for place, (form_of, beginning_of) in PLACES.items():
        form = form_of()
        prose = form.ids(PROSE)
        costs = []
        for length in lengths:
            pieces = [(token_id,) for token_id in (prose * (length // len(prose) + 1))[:length]]
            costs.append(median(partial(seconds, form, beginning_of(form), pieces), runs) / length * 1e6)
        print(f"{place:24}" + "".join(f"{cost:>10.2f}" for cost in costs))


def cost_per_byte(sizes: Sequence[int], piece: int, runs: int) -> None:
    print(f"\nnanoseconds per byte of one string argument, in pieces of {piece} bytes, by its size in bytes")
    print(f"{'':24}" + "".join(f"{size:>10,}" for size in sizes))
    for place in ("inside JSON arguments", "inside XML parameters"):
        form, beginning = PLACES[place][0](), PLACES[place][1](PLACES[place][0]())
        costs = []
        for size in sizes:
            text = (PROSE * (size // len(PROSE) + 1))[:size]
            pieces = [form.ids(text[at : at + piece]) for at in range(0, size, piece)]
            costs.append(median(partial(seconds, form, beginning, pieces), runs) / size * 1e9)
        print(f"{place:24}" + "".join(f"{cost:>10.1f}" for cost in costs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="a number is the median of so many runs (default 5)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="in tokens")
    parser.add_argument("--sizes", type=int, nargs="+", default=[300, 3_000, 300_000], help="of a string, in bytes")
    parser.add_argument("--piece", type=int, default=20, help="bytes of the string per feed (default 20)")
    options = parser.parse_args()
    cost_per_token(options.lengths, options.runs)
    cost_per_byte(options.sizes, options.piece, options.runs)


if __name__ == "__main__":
    main()
