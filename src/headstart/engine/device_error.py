"""Tell what an error of a device means. MLX raises a RuntimeError for each, so its message has to tell.

macOS ends the commands of a GPU that take too long, or that hold up the display. After a few of them its driver
ignores whatever the process sends, for as long as the process lives.
"""

from ..errors import DeviceLost, HeadstartError, OutOfMemory, printable_error

MEMORY = (
    "out of memory",
    "unable to allocate",
    "bad_alloc",
    # Metal's. The second is a number of buffers, the last the name of the third where macOS speaks another language.
    "greater than the maximum allowed buffer size",
    "resource limit (",
    "insufficient memory",
    "callbackerroroutofmemory",
)
TIMEOUT = (
    "caused gpu timeout error",
    "callbackerrortimeout",
    "impacting interactivity",
    "callbackerrorimpactinginteractivity",
)
IGNORED = ("for causing prior/excessive gpu errors", "callbackerrorsubmissionsignored")
COMMAND = ("command buffer execution failed",)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out."""
    return isinstance(error, MemoryError) or _says(error, MEMORY)


def is_timeout(error: BaseException) -> bool:
    """Return whether the driver ended a command that took too long."""
    return _says(error, TIMEOUT)


def is_failed_command(error: BaseException) -> bool:
    """Return whether a command failed on the device, when it had been handed over. Whatever was handed over beside it
    is void as well, and MLX reports it once: to whom waits first."""
    return _says(error, COMMAND)


def raise_if_lost(error: BaseException) -> None:
    """Raise a DeviceLost if the driver ignores this process."""
    if isinstance(error, DeviceLost):
        raise error
    if _says(error, IGNORED):
        raise DeviceLost(
            "the GPU's driver ignores this process after earlier errors, which only a new process ends: start it "
            f"again ({error})"
        ) from error


def explain(error: BaseException) -> HeadstartError:
    """Return the error of a request that was ended because of an error that is not its own, with a remedy."""
    if is_out_of_memory(error):
        return OutOfMemory(
            "memory ran out, and this request, the youngest, was ended so that others could go on: try again, or "
            f"serve with fewer --max-sequences or a smaller --prefix-cache-gb ({type(error).__name__}: {error})"
        )
    if is_timeout(error):
        return HeadstartError(
            "the GPU's driver ended this request's work again and again, because it took too long or held up the "
            "display: let the display sleep, or start with AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 "
            f"({printable_error(error)})"
        )
    return HeadstartError(printable_error(error))


def _says(error: BaseException, messages: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(message in text for message in messages)
