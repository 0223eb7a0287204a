"""A compiled program's memory on one device, and the compiler's words when it does not fit."""

import re
from dataclasses import dataclass

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)
_USAGE_TOTAL = re.compile(r"Memory Space: default \(color=0\)\s*Total bytes: (\d+)")
_REQUIRED = re.compile(r"required[^()]*\(([\d.]+)([KMGT]?)\)\s*exceeds available HBM \(([\d.]+)([KMGT]?)\)")
_USED_OF = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_SCALE = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory plan of an executable on one device, in bytes, tile padding included.

    `alias_bytes` are outputs that took the place of donated arguments; they are in both other figures.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    generated_code_bytes: int

    @property
    def total_bytes(self) -> int:
        """What the out-of-memory check looks at: arguments, outputs and temporaries; the code is extra."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    def __str__(self) -> str:
        gib = 2**30
        return (
            f"{self.total_bytes / gib:.3f} GiB: arguments {self.argument_bytes / gib:.3f}, outputs "
            f"{self.output_bytes / gib:.3f} (aliased {self.alias_bytes / gib:.3f}), temporaries "
            f"{self.temp_bytes / gib:.3f}"
        )


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """A program that does not fit.

    Attributes:
        required_bytes: what it needs, exact if the compiler's usage report was found, else as printed; None
            if the message does not say.
        available_bytes: the capacity, as printed (two decimals of GiB); None if the message does not say.
        message: the compiler's message.

    """

    required_bytes: int | None
    available_bytes: int | None
    message: str

    def __str__(self) -> str:
        if self.required_bytes is None or self.available_bytes is None:
            return f"out of memory: {self.message.splitlines()[0]}"
        gib = 2**30
        return f"out of memory: needs {self.required_bytes / gib:.2f} of {self.available_bytes / gib:.2f} GiB"


def parse_out_of_memory(message: str, usage_report: str = "") -> OutOfMemory:
    """Read the compiler's out-of-memory message.

    Args:
        message: the text of the RESOURCE_EXHAUSTED error.
        usage_report: the content of the dump's memory usage report, if there is one.

    Returns:
        The numbers that could be found.

    Example:
        >>> print(parse_out_of_memory("memory required (20.50G) exceeds available HBM (15.48G)"))
        out of memory: needs 20.50 of 15.48 GiB

    """
    match = _REQUIRED.search(message) or _USED_OF.search(message)
    required = available = None
    if match:
        required = round(float(match.group(1)) * _SCALE[match.group(2)])
        available = round(float(match.group(3)) * _SCALE[match.group(4)])
    exact = _USAGE_TOTAL.search(usage_report)
    if exact:
        required = int(exact.group(1))
    return OutOfMemory(required_bytes=required, available_bytes=available, message=message)


def memory_of_buffers(text: str) -> Memory:
    """Read the memory plan from the text of a buffer assignment, for a compilation that was stopped.

    Args:
        text: the dump's buffer assignment; constants are left out, as in the executable's own analysis.

    Returns:
        The plan, with no code.

    """
    arguments = outputs = alias = temporaries = 0
    for size_text, properties in _ALLOCATION.findall(text):
        size = int(size_text)
        if re.search(r"\bcolor [1-9]", properties):
            continue  # Another memory than HBM.
        is_argument = re.search(r"\bparameter \d+", properties) is not None
        is_output = "maybe-live-out" in properties
        arguments += size * is_argument
        outputs += size * is_output
        alias += size * (is_argument and is_output)
        if not is_argument and not is_output and not re.search(r"\bconstant\b|\bthread-local\b", properties):
            temporaries += size
    return Memory(
        argument_bytes=arguments,
        output_bytes=outputs,
        alias_bytes=alias,
        temp_bytes=temporaries,
        generated_code_bytes=0,
    )
