"""What a trace writer returns."""

from dataclasses import dataclass

BLANK_LINE = "\n\n"
SEGMENT_TOKEN = "<|segment|>"
# Text between two of these marks is read by the model but never learned from (planted slips).
UNLEARNED = "\x00"


@dataclass(frozen=True, slots=True)
class Trace:
    """Thinking in segments; from segment `settled` on the result is known (the rest verifies)."""

    segments: list[str]
    answer: str
    settled: int
    delimiter: str = BLANK_LINE

    def thinking(self, segments: int | None = None) -> str:
        """The thinking text, or its first `segments` segments."""
        return self.delimiter.join(self.segments[:segments])


def unlearned(text: str) -> str:
    """Mark a planted slip."""
    return f"{UNLEARNED}{text}{UNLEARNED}"
