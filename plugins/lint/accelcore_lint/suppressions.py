"""Comments that ignore findings: `# accel: ignore[ACC101]`, for a line, or for the file above its first statement."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from accelcore_lint.finding import Finding

_COMMENT = re.compile(r"#\s*accel:\s*ignore(?:\[([^\]]*)\])?", re.ASCII)
_NOTHING = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Comment:
    """One such comment, its place, and the codes in its brackets.

    Attributes:
        column, end: the characters of the line before it, and before its end.
        file: whether it stands above the first statement, and ignores in the whole file.
        alone: whether nothing precedes it on its line.
    """

    line: int
    column: int
    end: int
    codes: tuple[str, ...]
    file: bool
    alone: bool


@dataclass
class Suppressions:
    """All such comments of a file."""

    comments: list[Comment] = field(default_factory=list)

    def covers(self, finding: Finding) -> bool:
        """Return whether a comment ignores a finding: on its first line, on its last line, or for the file."""
        return any(
            finding.code in comment.codes and (comment.file or comment.line in {finding.line, finding.end_line})
            for comment in self.comments
        )

    def mistakes(self, known: Collection[str]) -> Iterator[tuple[tuple[int, int, int], str, str]]:
        """Yield line, first and last column of comments that ignore nothing, what is wrong and what to write."""
        for comment in self.comments:
            place = (comment.line, comment.column, comment.end)
            unknown = [code for code in comment.codes if code not in known]
            if unknown:
                yield (
                    place,
                    f"There is no rule {', '.join(map(ascii, unknown))} to ignore.",
                    "Write a code of this linter.",
                )
            elif not comment.codes:
                yield place, "This comment names no code, and ignores nothing.", "Write `# accel: ignore[ACC101]`."
            elif comment.alone and not comment.file:
                yield (
                    place,
                    "This comment is on a line of its own, and ignores nothing.",
                    "Write it behind the code, or above the first statement for the whole file.",
                )


def read(text: str) -> Suppressions:
    """Return the comments of a script. What cannot be read as Python has none."""
    found = Suppressions()
    if "accel:" not in text:
        return found
    begun = False
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            match = _COMMENT.match(token.string) if token.type == tokenize.COMMENT else None
            if match:
                line, column = token.start
                codes = tuple(code.strip() for code in (match[1] or "").split(",") if code.strip())
                alone = not token.line[:column].strip()
                found.comments.append(Comment(line, column, token.end[1], codes, alone and not begun, alone))
            elif token.type not in _NOTHING and not (token.type == tokenize.STRING and not begun):
                begun = True
    except (tokenize.TokenError, IndentationError):
        pass  # the parser says what is wrong
    return found
