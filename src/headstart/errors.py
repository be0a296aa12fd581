"""Errors that Headstart raises on purpose. Every message names the file or field, the cause and the remedy."""


class HeadstartError(Exception):
    """Base class of all errors that Headstart raises on purpose."""


class CheckpointError(HeadstartError):
    """A model folder cannot be used, or a name does not lead to one."""


class HeadError(CheckpointError):
    """A multi-token-prediction head is present but cannot be used; the trunk can."""


class DrafterError(CheckpointError):
    """A drafter cannot be used, or not with this model."""


class AdapterError(CheckpointError):
    """A LoRA adapter cannot be used, or not with this model."""


class HubError(HeadstartError):
    """The Hugging Face hub cannot be reached, or has no such model."""


class RequestError(HeadstartError):
    """A request is invalid or cannot be honoured.

    The message about a field begins with the field's name and a space; the server reads `param` from that.
    """


class GrammarLimit(HeadstartError):
    """An answer has met a limit on what its grammar may cost, which was not met when the grammar was compiled."""


class ClusterError(HeadstartError):
    """The machines of a cluster cannot work together."""


class EngineDown(HeadstartError):
    """The engine has stopped, and all its requests have ended."""


class DeviceLost(EngineDown):
    """The device does nothing for this process any more. Only a new process can go on."""


class OutOfMemory(HeadstartError):
    """The device ran out of memory, and this request was ended so that others could continue."""


class KernelTimeout(HeadstartError):
    """A step's results are void, because a kernel gave up waiting for its own blocks. It is computed again."""


class Busy(HeadstartError):
    """Too many requests are waiting, or the engine is closing: try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


def printable_error(error: BaseException) -> str:
    """Return an error of a library, with its type, as one short line that is safe to print."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def check_type(value: object, kinds: type | tuple[type, ...], name: str, remedy: str) -> None:
    """Raise RequestError for an argument of another type than `kinds`."""
    if not isinstance(value, kinds):
        kind = type(value).__name__
        raise RequestError(f"{name} is {'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}: {remedy}")


def check_text(text: str, name: str) -> None:
    """Raise RequestError for text that cannot be encoded, because it holds half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{text[error.start]!a} at position {error.start}"
        raise RequestError(f"{name} is not text: it holds half a character, {found}. Replace it") from error
